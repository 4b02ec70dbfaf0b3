"""The weights that a worker should have: those of the last update that targeted it. Pure.

A worker that missed that update (it was dead, or restarted with its first weights) is detected by
its label, or by the digest of its tensors if the label doesn't suffice. Invariant: a worker that
reports neither counts neither as having the weights nor as having missed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct, field
from msgspec.structs import replace

ALL_WORKERS: Final = "*"  # in place of a URL: the row for workers that have no row of their own


Epoch = Annotated[int, Meta(ge=0, le=2**62)]  # far below the first number that can't be encoded


class TargetVersion(Struct, frozen=True, kw_only=True):
    """A version that a worker should have.

    `is_new_label`: no worker had it before, so the label proves the weights. `digest`: over whole
    tensors, "" if none was agreed on. `waived`: an operator confirmed the worker's weights, so they
    are not checked. `path`: the path that a rollout loaded them from, or "".
    """

    label: str | None
    epoch: Epoch = 0
    is_new_label: bool = field(default=False, name="named")
    digest: str = ""
    models: tuple[str | None, ...] = ()
    waived: bool = False
    path: str = ""

    def is_proven_by(self, label: str | None) -> bool:
        return self.is_new_label and label is not None and label == self.label

    def is_missed_by(self, label: str | None) -> bool:
        comparable = label is not None and self.label is not None
        return comparable and label != self.label and not self.waived

    def needs_digest(self, label: str | None) -> bool:
        """Whether only the digest can prove the weights."""
        same = label == self.label and not self.is_new_label
        return bool(self.digest) and same and not self.waived


class PublishedVersion(Struct, frozen=True, omit_defaults=True):
    """The last published version: its epoch (the proxy's number for it) and its label.

    `targets`: by worker URL, or ALL_WORKERS. `highest`: the highest epoch so far if a rollout with
    a higher one was withdrawn, otherwise 0; no epoch is used twice.
    """

    epoch: Epoch
    label: str | None
    targets: dict[str, TargetVersion] = field(default_factory=dict, name="due")
    highest: Epoch = 0

    def target_for(self, url: str, model: str | None) -> TargetVersion | None:
        target = self.targets.get(url)
        if target is not None:
            return target
        default = self.targets.get(ALL_WORKERS)
        return default if default and model in default.models else None

    def after(self, target: TargetVersion, urls: Iterable[str] | None) -> PublishedVersion:
        """Publish `target` with the next epoch. `urls`: the update's targets, None for all."""
        epoch = max(self.epoch, self.highest) + 1
        target = replace(target, epoch=epoch)
        rows = {ALL_WORKERS: target} if urls is None else self.targets | dict.fromkeys(urls, target)
        return PublishedVersion(epoch, target.label, rows)

    def extended(
        self, target: TargetVersion, urls: Iterable[str], *, only: bool = False
    ) -> PublishedVersion:
        """Add workers that applied the version of this epoch; `only` removes all other rows."""
        rows = {} if only else self.targets
        return replace(self, targets=rows | dict.fromkeys(urls, target))

    def withdrawn(
        self, rows: Mapping[str, TargetVersion | None], to: tuple[int, str | None] | None = None
    ) -> PublishedVersion:
        """Restore the former rows of workers; None removes a worker's row.

        `to`: the epoch and label that are published again.
        """
        targets = {url: row for url, row in self.targets.items() if url not in rows}
        targets |= {url: row for url, row in rows.items() if row is not None}
        if to is None:
            return replace(self, targets=targets)
        highest = max(self.epoch, self.highest)
        epoch, label = to
        return PublishedVersion(epoch, label, targets, highest if highest > epoch else 0)

    def with_digest(self, digest: str) -> PublishedVersion:
        """Set the digest of the newest epoch, which had none."""
        rows = {
            url: replace(target, digest=digest) if target.epoch == self.epoch else target
            for url, target in self.targets.items()
        }
        return replace(self, targets=rows)

    def waive(self, models: Mapping[str, str | None]) -> PublishedVersion:
        """Waive checks of workers whose weights an operator confirmed. `models`: URL to model."""
        targets = {url: self.target_for(url, model) for url, model in models.items()}
        rows = {url: replace(target, waived=True) for url, target in targets.items() if target}
        return replace(self, targets=self.targets | rows)
