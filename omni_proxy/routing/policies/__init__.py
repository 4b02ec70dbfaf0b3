"""The policies by name. `build_policy` is the one place that knows the names; `contract` says what a
policy promises.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.routing.policies.cache_aware import CacheAware
from omni_proxy.routing.policies.hashing import ConsistentHashing, PrefixHash
from omni_proxy.routing.policies.least_request import LeastRequest, PowerOfTwo
from omni_proxy.routing.policies.policy import Policy, RandomBelow
from omni_proxy.routing.policies.round_robin import Random, RoundRobin
from omni_proxy.routing.policies.sticky import Sticky

__all__ = ["Policy", "RandomBelow", "build_policy"]


def build_policy(
    routing: RoutingConfig, below: RandomBelow, now: float, before: Policy | None = None
) -> Policy:
    """The policy that `routing` asks for; `now` is monotonic seconds.

    What of the policy `before` still serves lives on: a tree when sessions are switched, sessions
    when the policy below them is. Raises KeyError for a name that no policy has (the configuration
    refuses it earlier).
    """
    sessions = before if isinstance(before, Sticky) else None
    kept = sessions.inner if sessions else before
    policy = kept if kept is not None and kept.reconfigure(routing) else _make(routing, below, now)
    if not routing.sticky_sessions:
        return policy
    if sessions is None:
        return Sticky(policy, routing, now)
    sessions.replace_inner(policy)
    sessions.reconfigure(routing)
    return sessions


def _make(routing: RoutingConfig, below: RandomBelow, now: float) -> Policy:
    makers: dict[str, Callable[[], Policy]] = {
        "round_robin": RoundRobin,
        "random": lambda: Random(below),
        "least_request": LeastRequest,
        "power_of_two": lambda: PowerOfTwo(below),
        "cache_aware": lambda: CacheAware(routing, now),
        "consistent_hashing": ConsistentHashing,
        "prefix_hash": lambda: PrefixHash(routing),
    }
    return makers[routing.policy]()
