"""Exchanges as the proxy has them when they have ended."""

from __future__ import annotations

from typing import Any

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import match_route

CHAT = match_route("POST", "/v1/chat/completions")


def ended(worker: Worker | None = None, **reported: Any) -> Exchange:
    """A streamed chat: asked at 100, first chunk after 0.2 s, ten chunks, over after 1.1 s."""
    exchange = Exchange(100.0, "client")
    plain = {
        "method": "POST", "route": CHAT, "requirements": Requirements(0, model=reported.pop("model", None)),
        "status": 200, "outcome": "completed", "stream": True, "attempts": 1, "chunks": 10,
        "bytes_in": 50, "bytes_out": 1000, "head_at": 100.0, "body_at": 100.0,
        "sent_at": 100.0, "response_head_at": 100.1, "first_at": 100.2, "ended_at": 101.1,
        "relayed": True, "last_worker": worker, "longest_gap": 0.4, "request_id": b"r",
    }  # fmt: skip
    for name, value in (plain | reported).items():
        setattr(exchange, name, value)
    return exchange


def whole(worker: Worker | None = None, secs: float = 0.2, **reported: Any) -> Exchange:
    """An answer that came in one piece, `secs` after it was asked for."""
    at = 100.0 + secs
    once = {"stream": False, "chunks": 1, "longest_gap": 0.0}
    return ended(
        worker, **(once | {"response_head_at": at, "first_at": at, "ended_at": at} | reported)
    )


def refused(**reported: Any) -> Exchange:
    """Nobody could take it."""
    never: dict[str, Any] = dict.fromkeys(
        ("sent_at", "response_head_at", "first_at", "longest_gap"), 0.0
    )
    plain = {"status": 503, "outcome": "refused", "ended_by": "proxy", "attempts": 0, "chunks": 0}
    return ended(**(never | plain | reported))
