"""The template of a request head: which heads are written like one that was parsed.

Pure. Invariant: a head that matches differs from the parsed one in nothing but its varying values,
and none of those holds a byte that it must not. The native build has `head_template.pyx` in its
place, which compares without a copy of the head.
"""

from __future__ import annotations

from typing import Final, TypeAlias

_CRLF: Final = b"\r\n"

Step: TypeAlias = tuple[bytes, int, bytes, bytes | None]


class HeadTemplate:
    """The constant text of a head, between its varying values.

    Each step leads to one value: the constant text since the value before it (with its line end)
    up to the colon of the value's field, the length of that text, the bytes that the value must
    not contain, and the text that is sent after the value. That is None for a field that is not
    forwarded, such as the content-length, which is written again. `last` is the text after the
    last value, without the blank line.
    """

    __slots__ = ("counted", "first", "id_index", "last", "steps")

    def __init__(
        self, first: bytes, steps: tuple[Step, ...], last: bytes, *, counted: bool, id_index: int
    ) -> None:
        self.first = first  # of the forwarded lines, up to the first value in them
        self.steps = steps
        self.last = last
        self.counted = counted  # the content-length is among them
        self.id_index = id_index  # index of the request id among the parts; -1: none of the values

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
