"""Exchanges that have ended, as the proxy records them."""

from __future__ import annotations

from typing import Any

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import match_route

CHAT = match_route("POST", "/v1/chat/completions")


def ended(worker: Worker | None = None, **fields: Any) -> Exchange:
    """A streamed chat: begun at 100.0, first chunk after 0.2 s, ten chunks, ended after 1.1 s."""
    exchange = Exchange(100.0, "client")
    defaults = {
        "method": "POST", "route": CHAT, "requirements": Requirements(0, model=fields.pop("model", None)),
        "status": 200, "outcome": "completed", "stream": True, "attempts": 1, "chunks": 10,
        "bytes_in": 50, "bytes_out": 1000, "head_at": 100.0, "body_at": 100.0,
        "sent_at": 100.0, "response_head_at": 100.1, "first_at": 100.2, "ended_at": 101.1,
        "relayed": True, "last_worker": worker, "longest_gap": 0.4, "request_id": b"r",
    }  # fmt: skip
    for name, value in (defaults | fields).items():
        setattr(exchange, name, value)
    return exchange


def whole(worker: Worker | None = None, secs: float = 0.2, **fields: Any) -> Exchange:
    """An exchange whose response arrived in one piece, `secs` after the request."""
    ended_at = 100.0 + secs
    defaults = {"stream": False, "chunks": 1, "longest_gap": 0.0}
    return ended(
        worker,
        **(
            defaults
            | {"response_head_at": ended_at, "first_at": ended_at, "ended_at": ended_at}
            | fields
        ),
    )


def refused(**fields: Any) -> Exchange:
    """An exchange that was refused since no worker could serve it."""
    zeros: dict[str, Any] = dict.fromkeys(
        ("sent_at", "response_head_at", "first_at", "longest_gap"), 0.0
    )
    defaults = {
        "status": 503,
        "outcome": "refused",
        "ended_by": "proxy",
        "attempts": 0,
        "chunks": 0,
    }
    return ended(**(zeros | defaults | fields))
