"""Version constraints of requests: a label, a minimum epoch, or both.

Invariant: `reason_against` is empty if and only if `is_met_by` is true. A constraint that can't be
parsed is refused, never ignored: the request must not be served by other weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.wire.errors import bad_request
from omni_proxy.wire.header_fields import EPOCH_HINT, VERSION_HINT

_EPOCH: Final = re.compile(rb"[0-9]{1,18}\Z")


@dataclass(frozen=True, slots=True)
class VersionConstraint:
    """`label`: as sent by the client; matches the worker's label or the form shown in responses."""

    label: str | None = None
    min_epoch: int = 0

    def is_met_by(self, version: WeightVersion) -> bool:
        label = self.label is None or self.label in (version.label, version.shown)
        return label and version.epoch >= self.min_epoch

    def reason_against(self, version: WeightVersion) -> str:
        """Why this version doesn't meet the constraint, or ""."""
        return "" if self.is_met_by(version) else f"has weights {version}, not {self}"

    def __str__(self) -> str:
        label = [] if self.label is None else [repr(self.label)]
        epoch = [f"of epoch {self.min_epoch} or later"] if self.min_epoch else []
        return " ".join(label + epoch)


def parse_version_constraint(hints: Mapping[bytes, bytes]) -> VersionConstraint | None:
    """None if the hints have no constraint. Raises HttpError 400 for an invalid one."""
    label, epoch = hints.get(VERSION_HINT), hints.get(EPOCH_HINT)
    if label is None and epoch is None:
        return None
    name = None
    if label is not None:
        if not label.startswith(b"=") or not label[1:].strip():
            raise bad_request("x-omni-weight-version must be =LABEL")
        name = label[1:].strip().decode("latin-1")
    if epoch is not None and not _EPOCH.match(epoch):
        raise bad_request("x-omni-min-weight-epoch must be a number of 1 to 18 digits")
    return VersionConstraint(name, int(epoch or b"0"))
