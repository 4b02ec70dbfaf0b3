"""Which weights a worker should have: those of the last update that was meant for it.

A worker that did not take that update (it was dead, or began anew from its first weights) tells by
its label, else by the digest of its tensors. Invariant: of a worker that can't tell nothing is
claimed, neither that it has them nor that it missed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

EVERYBODY: Final = "*"  # no URL: whoever has no row of its own, and one of the models


class TargetVersion(Struct, frozen=True, kw_only=True):
    """`named`: nobody had this label before, so it alone proves the weights.

    `digest`: over whole tensors, "" where none was agreed on. `waived`: somebody vouches for it.
    """

    label: str | None
    epoch: int = 0
    named: bool = False
    digest: str = ""
    models: tuple[str | None, ...] = ()
    waived: bool = False

    def proven_by(self, label: str | None) -> bool:
        return self.named and label is not None and label == self.label

    def missed_with(self, label: str | None) -> bool:
        told = label is not None and self.label is not None
        return told and label != self.label and not self.waived

    def open_with(self, label: str | None) -> bool:
        """Whether only the digest can tell."""
        same = label == self.label and not self.named
        return bool(self.digest) and same and not self.waived


class PublishedVersion(Struct, frozen=True, omit_defaults=True):
    """The last version that workers took from an update: our number of it, and its label.

    `due`: by worker URL, or EVERYBODY.
    """

    epoch: int
    label: str | None
    due: dict[str, TargetVersion] = {}

    def due_of(self, url: str, model: str | None) -> TargetVersion | None:
        own = self.due.get(url)
        if own is not None:
            return own
        every = self.due.get(EVERYBODY)
        return every if every and model in every.models else None

    def after(self, due: TargetVersion, urls: Iterable[str] | None) -> PublishedVersion:
        """The next epoch; `urls` are those whom the update was meant for, None for everybody."""
        epoch = self.epoch + 1
        due = replace(due, epoch=epoch)
        rows = {EVERYBODY: due} if urls is None else self.due | dict.fromkeys(urls, due)
        return PublishedVersion(epoch, due.label, rows)

    def waive(self, models: Mapping[str, str | None]) -> PublishedVersion:
        """`models`: worker URL to model, of those that somebody vouches for."""
        found = {url: self.due_of(url, model) for url, model in models.items()}
        rows = {url: replace(due, waived=True) for url, due in found.items() if due}
        return replace(self, due=self.due | rows)
