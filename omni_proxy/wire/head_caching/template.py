"""The template of a request head: what stays the same, and where the varying values are.

Pure. Invariant: two heads that match one template differ in nothing but those values, each of
which is well-formed; the result has every field in the client's order.
"""

from __future__ import annotations

from typing import Final

import msgspec

_CRLF: Final = b"\r\n"
# Bytes that a varying value must not contain: in a field that is passed on unread (RFC 9110 5.5),
# and in one that may be the request id, to which surrounding spaces do not belong. The cost of the
# check grows with their number.
CONTROLS: Final = bytes(range(0x09)) + bytes(range(0x0A, 0x20)) + b"\x7f"
CONTROLS_AND_SPACES: Final = CONTROLS + b"\t "
# In their place if the value is the content-length.
COUNT: Final = b""

Step = tuple[bytes, int, bytes, bytes | None]


class HeadTemplate(msgspec.Struct, gc=False, eq=False):
    """The constant text of a head, between its varying values.

    Each step leads to one value: the constant text since the value before it (with its line end)
    up to the colon of the value's field, the length of that text, the bytes that the value must
    not contain, and the text that is sent after the value. That is None for a field that is not
    forwarded, such as the content-length, which is written again. `last` is the text after the
    last value, without the blank line.
    """

    first: bytes  # of the forwarded lines, up to the first value in them
    steps: tuple[Step, ...]
    last: bytes
    counted: bool  # the content-length is among them
    id_index: int  # index of the request id among the parts; -1: it is none of the values

    def match(self, head: bytes, length: bytes | None) -> list[bytes] | None:
        """The lines to forward, in parts, for a head without its blank line.

        None if the head does not match, its content-length is not `length`, or a value is empty or
        not plainly well-formed.
        """
        parts = [self.first]
        for same, size, forbidden, after in self.steps:
            if not head.startswith(same):
                return None
            value, _, head = head[size:].partition(_CRLF)
            if not forbidden:
                if value != length:
                    return None
            elif not value or value.translate(None, forbidden) != value:
                return None
            elif after is not None:
                parts += value, after
        return parts if head == self.last else None
