"""How a client writes its heads: what stays the same, and where the fields stand that vary.

Pure. Invariant: two heads with the same spelling and well-formed values differ in nothing but those
values.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

# Of a value that is split out: what it may hold, and how much of it.
VISIBLE: Final = bytes(range(0x21, 0x7F))
VALUE_BYTES: Final = 128
VARYING: Final = re.compile(
    rb"\r\n([Cc]ontent-[Ll]ength|[Xx]-[Rr]equest-[Ii][Dd]|[Tt]raceparent): ?"
    rb"([!-~]{1,128})(?=\r\n)"
)


class Spelling(msgspec.Struct, gc=False, eq=False):
    """How one client writes a head that is known, between the values that vary.

    Each value stands behind a pair of bytes: what stays the same since the last one (with its line
    end), and the field's name as it is written, with its colon. `last` is what follows the last
    value, without the blank line.
    """

    steps: tuple[tuple[bytes, bytes], ...]
    last: bytes
    lines: bytes  # as in RequestHead, without the fields that vary

    def values(self, head: bytes) -> list[bytes] | None:
        """Of a head without its blank line; None where it is not written like this.

        A value may be anything that stands in one line: whoever uses it judges it.
        """
        found = []
        for before, name in self.steps:
            same, _, head = head.partition(name)
            if same != before:
                return None
            value, _, head = head.partition(b"\r\n")
            found.append(value)
        return found if head == self.last else None


def spelling_of(head: bytes, lines: bytes) -> Spelling:
    """Of one whole head; `lines` as `Spelling` has them."""
    steps = []
    at = 0
    for found in VARYING.finditer(head):
        name = found.start(1)
        steps.append((head[at:name], head[name : found.start(2)]))
        at = found.end() + 2
    return Spelling(tuple(steps), head[at:-4], lines)
