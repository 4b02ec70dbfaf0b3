"""What is the same in all requests of a client that are spelled alike, and what of them varies.

Pure. Invariant: a request that `filled` accepts is one that the judge of heads has passed before,
with other well-formed values in the fields that vary; its body is as long as it says.
"""

from __future__ import annotations

from typing import Final

import msgspec

from omni_proxy.door.ask import JOIN_BYTES
from omni_proxy.routing.inspect import is_json
from omni_proxy.routing.table import ANYWHERE, Route, WrongMethod, match
from omni_proxy.wire.head import RequestHead
from omni_proxy.wire.spelling import VALUE_BYTES, VISIBLE, Spelling
from omni_proxy.wire.template import TEMPLATES

# A length of ours is looked up rather than a peer's one read: numbers cost fifty cache lines.
DIGITS: Final = tuple(b"%d" % size for size in range(JOIN_BYTES))
_CRLF: Final = b"\r\n"
_LENGTH: Final = b"content-length"
_ID: Final = b"x-request-id"


class Usual:
    """`head` is such a request's, without the fields that vary."""

    __slots__ = ("_id_at", "_length_at", "_others", "head", "route", "spelling")

    def __init__(self, head: RequestHead, spelling: Spelling, route: Route) -> None:
        names = [name.rstrip(b": ") for _, name in spelling.steps]
        kinds = [name.lower() for name in names]
        self.spelling = spelling
        self.route = route
        self._length_at = kinds.index(_LENGTH)
        self._id_at = kinds.index(_ID) if _ID in kinds else -1
        self._others = tuple(
            (at, name + b": ") for at, name in enumerate(names) if at != self._length_at
        )
        own_id = head.request_id if self._id_at < 0 else b""
        self.head = msgspec.structs.replace(head, lines=spelling.lines, length=0, request_id=own_id)

    def filled(self, values: list[bytes], size: int) -> list[bytes] | None:
        """The lines of the head as they go to a worker, in parts; None where a value is not plainly
        well-formed, or `size` not the length of the body that it tells."""
        if size >= JOIN_BYTES or values[self._length_at] != DIGITS[size]:
            return None
        parts = [self.head.lines]
        for at, name in self._others:
            value = values[at]
            if not 0 < len(value) <= VALUE_BYTES or value.translate(None, VISIBLE):
                return None
            parts += name, value, _CRLF
        return parts

    def request_id(self, values: list[bytes]) -> bytes:
        """Empty where the head has none."""
        return values[self._id_at] if self._id_at >= 0 else self.head.request_id

    def lines(self, values: list[bytes]) -> bytes:
        """As in a RequestHead."""
        more = [name + values[at] + _CRLF for at, name in self._others]
        return b"".join((self.head.lines, *more))


class Usuals:
    """What is known of the heads that many connections have in common."""

    def __init__(self) -> None:
        self._known: dict[Spelling, Usual | None] = {}

    def of(self, head: RequestHead) -> Usual | None:
        """For the requests that are spelled like this one; None where they can't go the short
        way."""
        spelling = head.spelling
        if spelling is None:
            return None
        if spelling not in self._known:
            if len(self._known) >= TEMPLATES:
                self._known.clear()
            self._known[spelling] = _usual_of(head, spelling)
        return self._known[spelling]


def _usual_of(head: RequestHead, spelling: Spelling) -> Usual | None:
    if not any(name.lower().startswith(_LENGTH) for _, name in spelling.steps):
        return None
    method, _, path = head.words
    try:
        route = match(method, path)
    except WrongMethod:
        return None
    if route is None or route.websocket or route.place is not ANYWHERE or not is_json(route, head):
        return None
    if head.hints or head.upgrade or head.expects_continue or head.http_1_0 or not head.keep_alive:
        return None
    return Usual(head, spelling, route)
