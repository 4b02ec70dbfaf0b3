"""The weights that a worker should have: those of the last update that targeted it. Pure.

A worker that did not take that update (it was dead, or restarted with its first weights) is
detected by its label, else by the digest of its tensors. Invariant: of a worker that reports
neither, nothing is claimed: not that it has the weights, nor that it missed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

ALL_WORKERS: Final = "*"  # no URL: the row for workers of the models that have no row of their own


class TargetVersion(Struct, frozen=True, kw_only=True):
    """`named`: no worker had this label before, so the label alone proves the weights.

    `digest`: over whole tensors, "" if none was agreed on. `waived`: an operator vouches for the
    worker's weights.
    """

    label: str | None
    epoch: int = 0
    named: bool = False
    digest: str = ""
    models: tuple[str | None, ...] = ()
    waived: bool = False

    def is_proven_by(self, label: str | None) -> bool:
        return self.named and label is not None and label == self.label

    def is_missed_by(self, label: str | None) -> bool:
        known = label is not None and self.label is not None
        return known and label != self.label and not self.waived

    def needs_digest(self, label: str | None) -> bool:
        """Whether only the digest can prove the weights."""
        same = label == self.label and not self.named
        return bool(self.digest) and same and not self.waived


class PublishedVersion(Struct, frozen=True, omit_defaults=True):
    """The last version that workers took from an update: the proxy's number for it, and its label.

    `targets`: by worker URL, or ALL_WORKERS.
    """

    epoch: int
    label: str | None
    targets: dict[str, TargetVersion] = field(default_factory=dict, name="due")

    def target_for(self, url: str, model: str | None) -> TargetVersion | None:
        target = self.targets.get(url)
        if target is not None:
            return target
        default = self.targets.get(ALL_WORKERS)
        return default if default and model in default.models else None

    def after(self, target: TargetVersion, urls: Iterable[str] | None) -> PublishedVersion:
        """The next epoch; `urls` are the targets of the update, None for all workers."""
        epoch = self.epoch + 1
        target = replace(target, epoch=epoch)
        rows = {ALL_WORKERS: target} if urls is None else self.targets | dict.fromkeys(urls, target)
        return PublishedVersion(epoch, target.label, rows)

    def waive(self, models: Mapping[str, str | None]) -> PublishedVersion:
        """`models`: worker URL to model, of the workers that an operator vouches for."""
        targets = {url: self.target_for(url, model) for url, model in models.items()}
        rows = {url: replace(target, waived=True) for url, target in targets.items() if target}
        return replace(self, targets=self.targets | rows)
