"""The id of a request: from its head, its body, or new; and the forwarded headers that have it.

Contract: an id that is sent on is valid in a header. The caller keeps it in the exchange, for the
response, the logs and the worker. Must not read the body, only its requirements.
"""

from __future__ import annotations

from random import getrandbits
from typing import Final

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.wire.forwarded import ForwardedHeaders
from omni_proxy.wire.request import RequestHead

REQUEST_ID_NAME: Final = b"X-SGLang-Omni-Request-ID: "


def new_request_id() -> bytes:
    return b"%032x" % getrandbits(128)


def id_from_body(need: Requirements) -> bytes:
    """The id of a request whose head has none: the one in its body if it is valid in a header, else
    a new one."""
    text = need.request_id
    if text and len(text) <= 256 and text.isascii() and text.isprintable():
        return text.encode()
    return new_request_id()


def add_forwarded(forwarded: ForwardedHeaders, exchange: Exchange, head: RequestHead) -> None:
    """Add the client's address and the request id to the forwarded lines, as configured."""
    head.lines += forwarded.forwarded_for_line(exchange.client)
    if forwarded.id_name:
        head.lines = forwarded.set_request_id(head.lines, exchange.request_id)
        exchange.request_id_line = forwarded.request_id_line(exchange.request_id)
