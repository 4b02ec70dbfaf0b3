"""Fleets with prefill and decode pools, and requests for them."""

from omni_proxy.config.schema import DisaggregationConfig, RoutingConfig
from omni_proxy.fleet.worker import CAPABILITY_BITS
from omni_proxy.routing.disaggregation.pairing import Pairing, Policies, pick_placement
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.body_fields import decode_body
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies import build_policy
from omni_proxy.routing.routes import BOTH_ENGINES
from tests.fleet.entries import entry, fleet_of

CHAT = CAPABILITY_BITS["chat"]


def pools_of(*, policy="round_robin", **rules):
    routing = RoutingConfig(policy=policy, disaggregation=DisaggregationConfig(**rules))
    return PoolPolicies(routing, lambda bound: 0, lambda: 0.0)


def request(text="", **fields):
    body = decode_body(b'{"prompt": "%s"}' % text.encode()) if text else None
    defaults = {"mask": CHAT, "legs": BOTH_ENGINES, "decoded": body}
    return Requirements(**(defaults | fields))


def pair_fleet(prefills=2, decodes=2, **fields):
    """Workers `p0`, `p1` … and `d0`, `d1` …, all with the same fields."""
    return fleet_of(
        *(entry(f"p{number}", role="prefill", **fields) for number in range(prefills)),
        *(entry(f"d{number}", role="decode", **fields) for number in range(decodes)),
    )


class Chooser:
    """Calls `pick_placement` on one fleet."""

    def __init__(self, fleet, pools=None):
        self.fleet = fleet
        self.pools = pools or pools_of()
        self.pairing = Pairing(fleet)
        self.regular = build_policy(RoutingConfig(), lambda bound: 0, 0.0)

    def place(self, need=None, tried=()):
        policies = Policies(self.regular, self.pools)
        return pick_placement(self.pairing, need or request(), policies, tried)

    def names(self, need=None, tried=()):
        """The host names of the worker that responds, and of the prefill worker or None."""
        placement = self.place(need, tried)
        prefill = placement.prefill
        return name_of(placement.worker), prefill and name_of(prefill)


def name_of(worker):
    return (
        worker.display_id.partition(":")[0]
        + worker.id.partition("@")[1]
        + (worker.id.partition("@")[2])
    )
