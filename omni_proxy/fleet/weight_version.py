"""The version of a worker's weights: the label that the worker reports, and the proxy's own epoch.

Invariant: `lines` are valid header lines for any label. A label that is not plain header text is
percent-encoded; one that is too long is truncated and followed by its hash. Versions with equal
label and epoch are equal.
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
    """`label`: None while unknown. `epoch`: 0 if the weights came from no update of the proxy."""

    label: str | None = None
    epoch: int = 0
    shown: str = field(init=False, compare=False)  # the label as a header value, "" without one
    lines: bytes = field(init=False, compare=False)  # header lines, each ended by CRLF

    def __post_init__(self) -> None:
        text = _header_text(self.label or "")
        label = f"x-omni-weight-version: {text}\r\n" if text else ""
        epoch = f"x-omni-weight-epoch: {self.epoch}\r\n" if self.epoch else ""
        object.__setattr__(self, "shown", text)
        object.__setattr__(self, "lines", (label + epoch).encode("ascii"))

    def end_header_lines(self, start: WeightVersion) -> bytes:
        """Trailer lines for a response that began with `start` and ends with this version.

        b"" if they are the same. The field is empty if this version has no label: the weights
        changed to a version that is not known yet.
        """
        if not self.differs_from(start):
            return b""
        lines = f"x-omni-weight-version-end: {self.shown}\r\n"
        if self.epoch and self.epoch != start.epoch:
            lines += f"x-omni-weight-epoch-end: {self.epoch}\r\n"
        return lines.encode("ascii")

    def differs_from(self, start: WeightVersion) -> bool:
        """Whether the weights changed; a label that only became known since is no change."""
        became_known = start == UNKNOWN_VERSION and not self.epoch
        return self != start and not became_known

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
