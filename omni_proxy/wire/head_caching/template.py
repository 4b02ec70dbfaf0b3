"""The template of a request head: what stays the same, and where the varying values are.

Pure. Invariant: two heads that match one template differ in nothing but those values, each of
which is well-formed; the result has every field in the client's order.
"""

from __future__ import annotations

from typing import Final

import msgspec

_CRLF: Final = b"\r\n"
# What a value that varies must not hold: where its field goes on unread (RFC 9110 5.5), and where
# it may be the request's id, of which spaces at its ends would be no part. There are few of them,
# for their number is what looking for them costs.
CONTROLS: Final = bytes(range(0x09)) + bytes(range(0x0A, 0x20)) + b"\x7f"
CONTROLS_AND_SPACES: Final = CONTROLS + b"\t "
# In their place where the value is the content-length.
COUNT: Final = b""

Step = tuple[bytes, int, bytes, bytes | None]


class HeadTemplate(msgspec.Struct, gc=False, eq=False):
    """How a head that is known is written, between the values that vary.

    Each step to a value is what stays the same since the last one (with its line end), up to the
    name of the value's field and its colon, how long that is, the bytes that the value must not
    hold, and what goes on behind it; that is None for a field that ends here, such as the
    content-length, which is written anew. `last` is what follows the last value, without the blank
    line.
    """

    first: bytes  # of the lines as they go on, until the first value in them
    steps: tuple[Step, ...]
    last: bytes
    counted: bool  # the content-length is among them
    id_index: int  # where the request's id is among the parts; -1: it is none of the values

    def match(self, head: bytes, length: bytes | None) -> list[bytes] | None:
        """The lines, in parts, of a head without its blank line, as they go on. None where it is
        not written like this, its content-length is not `length`, or a value is empty or not
        plainly well-formed."""
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
