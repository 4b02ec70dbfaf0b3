"""Which weights a worker has: the label that it gives them, and our own number of them.

Invariant: `lines` may stand in an answer's head whatever the label holds. A label that is no plain
header text is percent-encoded; one that is too long is cut, its hash behind it. Equal label and
epoch are equal versions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final
from urllib.parse import quote

LABEL_BYTES: Final = 256
_HASH_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """`label`: None while it is not known. `epoch`: 0 where no update of ours put them there."""

    label: str | None = None
    epoch: int = 0
    shown: str = field(init=False, compare=False)  # the label as heads have it, "" without one
    lines: bytes = field(init=False, compare=False)  # header lines, each ended by CRLF

    def __post_init__(self) -> None:
        shown = _header_text(self.label or "")
        label = f"x-omni-weight-version: {shown}\r\n" if shown else ""
        epoch = f"x-omni-weight-epoch: {self.epoch}\r\n" if self.epoch else ""
        object.__setattr__(self, "shown", shown)
        object.__setattr__(self, "lines", (label + epoch).encode("ascii"))

    def end_header_lines(self, start: WeightVersion) -> bytes:
        """What says that an answer which began with `start` has come to these; b"" where it did.

        Without a label the field stands all the same, empty: changed, to what is not known yet.
        """
        if not self.differs_from(start):
            return b""
        lines = f"x-omni-weight-version-end: {self.shown}\r\n"
        if self.epoch and self.epoch != start.epoch:
            lines += f"x-omni-weight-epoch-end: {self.epoch}\r\n"
        return lines.encode("ascii")

    def differs_from(self, start: WeightVersion) -> bool:
        """A label that was only learnt meanwhile is no change of the weights."""
        learnt = start == UNKNOWN_VERSION and not self.epoch
        return self != start and not learnt

    def __str__(self) -> str:
        label = "unknown" if self.label is None else repr(self.label)
        return f"{label} (epoch {self.epoch})" if self.epoch else label


def _header_text(label: str) -> str:
    plain = label.isascii() and label.isprintable() and label == label.strip()
    text = label if plain else quote(label, safe="", errors="replace")
    if len(text) <= LABEL_BYTES:
        return text
    digest = sha256(label.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    return f"{text[: LABEL_BYTES - _HASH_DIGITS - 1]}~{digest}"


UNKNOWN_VERSION: Final = WeightVersion()
