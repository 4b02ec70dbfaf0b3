"""Timeouts of an exchange, from the configuration. Pure.

Invariant: each timeout is positive; one that is off is `inf`, so that comparisons need no check.
Phases of an exchange and their deadlines: `loop/stream.py`; the sweep that ends tasks past a
deadline: `loop/timers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from omni_proxy.config.schema import Config


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds; `inf`: none."""

    connect: float
    response_head: float
    first_byte: float
    idle: float
    client_idle: float
    client_head: float
    client_body: float
    total: float
    sse_keepalive: float  # interval of comments to a client that waits; 0: none
    transfer: float  # from the end of prefill to the decode worker's first byte
    prefill_head: float  # the shorter of `response_head` and `transfer`


def timeouts_of(config: Config) -> Timeouts:
    server, configured = config.server, config.server.timeouts
    transfer = config.routing.disaggregation.transfer_timeout_secs or inf
    return Timeouts(
        connect=configured.connect_secs or inf,
        response_head=configured.response_head_secs or inf,
        first_byte=configured.first_byte_secs or configured.idle_secs or inf,
        idle=configured.idle_secs or inf,
        client_idle=configured.client_idle_secs or inf,
        client_head=configured.client_head_secs or inf,
        client_body=configured.client_body_secs or inf,
        total=server.request_timeout_secs or inf,
        sse_keepalive=server.sse_keepalive_secs,
        transfer=transfer,
        prefill_head=min(configured.response_head_secs or inf, transfer),
    )
