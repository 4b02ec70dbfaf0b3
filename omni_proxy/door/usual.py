"""What is the same in all requests of a client that are spelled alike, and what of them varies.

Pure. Invariant: what is spelled so was judged before, and its body alone says which workers of its
route may have it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from omni_proxy.routing.inspect import is_json
from omni_proxy.routing.table import ANYWHERE, Route, WrongMethod, match
from omni_proxy.routing.voices import SPEECH_TRAFFIC
from omni_proxy.wire.caching import LruCache
from omni_proxy.wire.head import RequestHead
from omni_proxy.wire.spelling import Spelling
from omni_proxy.wire.template import TEMPLATES


class Usual:
    """`head` is such a request's, without the fields that vary; `source` is who knows it."""

    __slots__ = ("head", "route", "source", "spelling")

    def __init__(self, head: RequestHead, spelling: Spelling, route: Route, source: Usuals) -> None:
        own_id = head.request_id if spelling.id_at < 0 else b""
        self.head = msgspec.structs.replace(head, lines=spelling.first, length=0, request_id=own_id)
        self.spelling = spelling
        self.route = route
        self.source = source


class _Never:
    """In the place of a Usual: requests that are spelled so go the long way."""


_NEVER: Final = _Never()


class Usuals:
    """What is known of the heads that many connections have in common, under one configuration."""

    def __init__(self) -> None:
        self._known: LruCache[Spelling, Usual | _Never] = LruCache(TEMPLATES)

    def of(self, head: RequestHead) -> Usual | None:
        """For the requests that are spelled like this one; None where they can't go the short
        way."""
        spelling = head.spelling
        if spelling is None:
            return None
        known = self._known.get(spelling)
        if known is None:
            known = self._made(head, spelling) or _NEVER
            self._known.put(spelling, known)
        return known if isinstance(known, Usual) else None

    def _made(self, head: RequestHead, spelling: Spelling) -> Usual | None:
        if not spelling.counted:
            return None
        method, _, path = head.words
        try:
            route = match(method, path)
        except WrongMethod:
            return None
        if route is None or route.websocket or route.place is not ANYWHERE:
            return None
        if route.traffic in SPEECH_TRAFFIC:  # a voice may bind it to one worker
            return None
        special = (
            head.hints or head.origin or head.upgrade or head.expects_continue or head.http_1_0
        )
        if special or not head.keep_alive or not is_json(route, head):
            return None
        return Usual(head, spelling, route, self)
