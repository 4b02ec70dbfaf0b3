"""The template of a request head: matches heads that differ from a parsed one only in some values.

Pure. Invariant: a head that matches differs from the parsed one only in its varying values, and
none of those contains a forbidden byte. The native build uses `head_template.pyx` instead, which
compares without copying the head.
"""

from __future__ import annotations

from typing import Final, TypeAlias

_CRLF: Final = b"\r\n"

Step: TypeAlias = tuple[bytes, int, bytes, bytes | None]


class HeadTemplate:
    """The constant text of a head, between its varying values.

    Each step leads to one value: the constant text since the value before it (with its line end)
    up to the colon of the value's field, the length of that text, the bytes that the value must
    not contain, and the text that is sent after the value: None for a field that is not forwarded,
    such as the content-length, which the proxy writes. `last` is the text after the last value and
    its line end, with the blank line.
    """

    __slots__ = ("_end", "_values", "counted", "first", "id_index", "last", "steps")

    def __init__(
        self, first: bytes, steps: tuple[Step, ...], last: bytes, *, counted: bool, id_index: int
    ) -> None:
        if not all(same for same, *_ in steps):
            raise ValueError("a step without the text before its value")
        if not last.endswith(_CRLF):
            raise ValueError("a template without the blank line")
        self.first = first  # the forwarded lines up to their first varying value
        self.steps = steps
        self.last = last
        self.counted = counted  # the content-length is one of the varying values
        self.id_index = id_index  # index of the request id in the parts; -1: it does not vary
        # Most clients send the content-length last. Then the whole end of a head is known.
        self._values, self._end = steps, (b"", last)
        if steps and not steps[-1][2]:
            self._values, self._end = steps[:-1], (steps[-1][0], _CRLF + last)

    def match(self, head: bytes, length: bytes | None) -> list[bytes] | None:
        """The lines to forward, in parts, for a head with its blank line.

        None if the head does not match, its content-length is not `length`, or a value is empty or
        not plainly well-formed.
        """
        parts = [self.first]
        for same, _, forbidden, after in self._values:
            rest = head.removeprefix(same)
            if len(rest) == len(head):
                return None
            value, _, head = rest.partition(_CRLF)
            if not forbidden:
                if value != length:
                    return None
            elif not value.replace(b"-", b"").isalnum() and (  # most ids pass this faster check
                not value or value.translate(None, forbidden) != value
            ):
                return None
            elif after is not None:
                parts += value, after
        before_length, last = self._end
        if before_length:
            if length is None:
                return None
            last = before_length + length + last
        return parts if head == last else None
