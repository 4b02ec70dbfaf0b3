"""The policies: the interface (`policy`), the built-in policies, and policies of other packages
(`plugins`).

`build_policy` creates the policy that a configuration names.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.routing.policies.event_aware import EventAware
from omni_proxy.routing.policies.hashing import ConsistentHashing, PrefixHash
from omni_proxy.routing.policies.least_request import LeastRequest, PowerOfTwo
from omni_proxy.routing.policies.plugins import create_plugin
from omni_proxy.routing.policies.policy import Policy, RandomBelow
from omni_proxy.routing.policies.round_robin import Random, RoundRobin
from omni_proxy.routing.policies.sticky import Sticky

__all__ = ["BUILT_IN", "Policy", "RandomBelow", "build_policy", "reads_prompts"]

# Keys: the names in `config.fields.POLICIES`.
BUILT_IN: Final[dict[str, type[Policy]]] = {
    "round_robin": RoundRobin,
    "least_request": LeastRequest,
    "random": Random,
    "power_of_two": PowerOfTwo,
    "cache_aware": EventAware,
    "consistent_hashing": ConsistentHashing,
    "prefix_hash": PrefixHash,
}


def reads_prompts(routing: RoutingConfig) -> bool:
    """Whether the policy of this configuration reads the prompt of each request."""
    built_in = BUILT_IN.get(routing.policy)
    return built_in is None or built_in.reads_prompts


def build_policy(
    routing: RoutingConfig, random_below: RandomBelow, now: float, before: Policy | None = None
) -> Policy:
    """The policy that `routing` names; `now` is monotonic seconds.

    If the name is unchanged, the policy `before` is kept and gets the new parameters. Sessions
    survive a change of the inner policy, which itself survives switching sessions on or off.
    """
    sessions = before if isinstance(before, Sticky) else None
    inner = sessions.inner if sessions else before
    if inner is not None and inner.name == routing.policy and inner.reconfigure(routing):
        policy = inner
    elif built_in := BUILT_IN.get(routing.policy):
        policy = built_in.create(routing, random_below, now)
    else:
        policy = create_plugin(routing, random_below, now)
    if not routing.sticky_sessions:
        return policy
    if sessions is None:
        return Sticky(policy, routing, now)
    sessions.replace_inner(policy)
    sessions.reconfigure(routing)
    return sessions
