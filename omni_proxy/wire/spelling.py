"""How a client writes its heads: what stays the same, and where the fields stand that vary.

Pure. Invariant: two heads with the same spelling and well-formed values differ in nothing but those
values.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

_CRLF: Final = b"\r\n"
# Of a value that is split out: what it may hold, and how much of it.
VISIBLE: Final = bytes(range(0x21, 0x7F))
VALUE_BYTES: Final = 128
VARYING: Final = re.compile(
    rb"\r\n([Cc]ontent-[Ll]ength|[Xx]-[Rr]equest-[Ii][Dd]|[Tt]raceparent): ?"
    rb"([!-~]{1,128})(?=\r\n)"
)


class Spelling(msgspec.Struct, gc=False, eq=False):
    """How one client writes a head that is known, between the values that vary.

    Each step to a value is what stays the same since the last one (with its line end), the field's
    name as it is written, with its colon, and how its line begins when it goes on; that is empty
    for the content-length, which is written anew. `last` is what follows the last value, without
    the blank line.
    """

    lines: bytes  # as in RequestHead, without the fields that vary
    steps: tuple[tuple[bytes, bytes, bytes], ...]
    last: bytes
    counted: bool  # the content-length is among them
    id_at: int  # where the request's id is among the parts; -1: it is none of the values

    def filled(self, head: bytes, length: bytes) -> list[bytes] | None:
        """The lines, in parts, of a head without its blank line, as they go on. None where it is
        not written like this, its content-length is not `length`, or a value is not plainly
        well-formed."""
        parts = [self.lines]
        for before, name, line in self.steps:
            same, _, head = head.partition(name)
            if same != before:
                return None
            value, _, head = head.partition(_CRLF)
            if not line:
                if value != length:
                    return None
            elif 0 < len(value) <= VALUE_BYTES and not value.translate(None, VISIBLE):
                parts += line, value, _CRLF
            else:
                return None
        return parts if head == self.last else None


def spelling_of(head: bytes, lines: bytes) -> Spelling:
    """Of one whole head; `lines` as `Spelling` has them."""
    steps: list[tuple[bytes, bytes, bytes]] = []
    at, id_at, counted = 0, -1, False
    for found in VARYING.finditer(head):
        name, begins = found[1].lower(), found.start(1)
        if name == b"x-request-id":
            id_at = 3 * (len(steps) - counted) + 2
        line = b"" if name == b"content-length" else found[1] + b": "
        counted |= not line
        steps.append((head[at:begins], head[begins : found.start(2)], line))
        at = found.end() + 2
    return Spelling(lines, tuple(steps), head[at:-4], counted, id_at)
