"""The services that all exchanges share.

Contract: the record itself never changes; each member defines how it may change. Built once, by
`dataplane.DataPlane`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from omni_proxy.dataplane.admission.inflight import InFlight
from omni_proxy.dataplane.admission.queue import Queue
from omni_proxy.dataplane.exchange.exchange import OUTCOMES, Recorders
from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.timers import Timers
from omni_proxy.dataplane.settings import Settings
from omni_proxy.dataplane.upstream.balancer import Balancer
from omni_proxy.dataplane.upstream.pool import UpstreamPools
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.kv_connectors.mooncake import EngineIds
from omni_proxy.routing.policies import RandomBelow
from omni_proxy.wire.head_caching.response_heads import ResponseHeadCache


class Totals:
    """The totals in GET /status, since the start."""

    def __init__(self) -> None:
        self.accepted = 0
        self.failed_handshakes = 0  # of TLS
        self.failed_proxy_headers = 0  # connections without a valid PROXY header
        # Exchanges, by outcome. CPython 3.11 counts faster in a plain dict than in a subclass.
        self.ended: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self.across_versions = 0  # responses during which the worker's weights changed

    def ended_by_outcome(self) -> dict[str, int]:
        """Exchanges that have ended, by outcome; outcomes without any are left out."""
        return {outcome: count for outcome, count in self.ended.items() if count}


@dataclass(frozen=True, slots=True)
class ExchangeServices:
    """The services of the data plane. `random_below(n)`: for the back-off of retries."""

    loop: EventLoop
    fleet: Fleet
    settings: Settings
    inflight: InFlight
    balancer: Balancer
    queue: Queue
    upstream_pools: UpstreamPools
    response_heads: ResponseHeadCache
    timers: Timers
    recorders: Recorders
    totals: Totals
    keep_voices_at: Callable[[Worker], None]
    random_below: RandomBelow
    engine_ids: EngineIds = field(default_factory=EngineIds)
