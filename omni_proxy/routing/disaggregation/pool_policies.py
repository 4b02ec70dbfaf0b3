"""The policies of the prefill and the decode pool, each with its own state, and predictions of what
decode workers have cached.

Invariant: each pool has its own policy object: the turns, prefix trees and sessions of the two
pools and of the regular workers are independent. A reload keeps the state of a policy whose name
is unchanged. In a fleet without pools no policy is built here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from omni_proxy.config.fields import Role
from omni_proxy.config.schema import DisaggregationConfig, RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.cluster_hints import ClusterHints
from omni_proxy.routing.inspect.body_fields import KeyedBodyFields
from omni_proxy.routing.inspect.prefix_text import LIMIT, TOKENS, prompt_bytes
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.policies import Policy, RandomBelow, build_policy
from omni_proxy.routing.policies.cache_cost import BYTES_PER_TOKEN
from omni_proxy.routing.policies.event_aware import EventAware
from omni_proxy.routing.policies.session_load import PrefixedSessions, Sessions
from omni_proxy.routing.policies.sticky import Sticky

SHORTEST_TOKEN: Final = {TOKENS: 2}  # bytes by mark: a digit and a comma
POOLS: Final[tuple[Role, ...]] = ("prefill", "decode")


class PoolPolicies:
    """`random_below` and `now` as for `build_policy`."""

    def __init__(
        self, routing: RoutingConfig, random_below: RandomBelow, now: Callable[[], float]
    ) -> None:
        self.rules: DisaggregationConfig = routing.disaggregation
        self._routing = routing
        self._random_below = random_below
        self._now = now
        self.built: dict[Role, Policy] = {}  # for frequent reads; `of` builds missing ones
        self._needs_affinity_key: bool | None = None  # None: not computed for this configuration
        self._knowledge: EventAware | None = None  # predictions, if the decode policy has none
        self._sessions: Sessions | None = None
        self._held: tuple[frozenset[str], Callable[[Worker], bool]] | None = None
        self._blocks: BlockIndex | None = None
        self._hints: ClusterHints | None = None

    def of(self, role: Role) -> Policy:
        """The policy of the prefill or the decode pool."""
        policy = self.built.get(role)
        if policy is None:
            policy = self.built[role] = self._build(role, None)
        return policy

    def configure(self, routing: RoutingConfig) -> None:
        """Apply another configuration."""
        self._routing, self.rules = routing, routing.disaggregation
        self._needs_affinity_key = None
        for role, before in self.built.items():
            self.built[role] = self._build(role, before)
        if not self.rules.min_uncached_tokens:
            self._knowledge = None
        elif self._knowledge is not None:
            self._knowledge.reconfigure(routing)

    def use_sessions(self, sessions: Sessions) -> None:
        """Use a table of sticky sessions that is shared with other policies."""
        self._sessions = sessions
        for role, policy in self.built.items():
            self._share_sessions(role, policy)

    def use_blocks(self, blocks: BlockIndex) -> None:
        """See `Policy.use_blocks`."""
        self._blocks = blocks
        for policy in self._policies():
            policy.use_blocks(blocks)

    def use_hints(self, hints: ClusterHints) -> None:
        """See `Policy.use_hints`; also shares sessions."""
        self._hints = hints
        for role, policy in self.built.items():
            self._share_hints(role, policy)

    def place_session(self, digest: bytes, worker: Worker | None) -> None:
        """See `Sticky.place_session`; `worker` None: the session is finished in both pools."""
        for role, policy in self.built.items():
            if isinstance(policy, Sticky) and (worker is None or worker.role == role):
                policy.place_session(digest, worker)

    def hold_for(self, reasons: frozenset[str], is_member: Callable[[Worker], bool]) -> None:
        """See `Sticky.hold_for`. A session waits only for its decode worker, which has its context
        cached, not for its prefill worker."""
        self._held = (reasons, is_member)
        policy = self.built.get("decode")
        if isinstance(policy, Sticky):
            policy.hold_for(reasons, is_member)

    @property
    def needs_affinity_key(self) -> bool:
        if self._needs_affinity_key is None:
            self._needs_affinity_key = any(self.of(role).needs_affinity_key for role in POOLS)
        return self._needs_affinity_key

    def held_worker(self, requirements: Requirements) -> Worker | None:
        """The decode worker that the request's session waits for; None if it does not wait."""
        policy = self.of("decode")
        return policy.held_worker(requirements) if isinstance(policy, Sticky) else None

    def finish_session(self, key: str) -> bool:
        existed = [
            policy.finish_session(key)
            for policy in self.built.values()
            if isinstance(policy, Sticky)
        ]
        return any(existed)

    def session_count(self, worker: Worker) -> int:
        """Number of sessions at this worker, in the policy of its pool."""
        policy = self.built.get(worker.role)
        return policy.session_count(worker) if isinstance(policy, Sticky) else 0

    def forget_worker(self, worker: Worker) -> None:
        for policy in self._policies():
            policy.forget_worker(worker)

    def maintain(self, now: float) -> None:
        for policy in self._policies():
            policy.maintain(now)

    def stats(self) -> dict[str, dict[str, object]]:
        """JSON-serializable, by role; empty until a pool was used."""
        return {
            role: {"name": policy.name, **policy.stats()} for role, policy in self.built.items()
        }

    def uncached_tokens(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> Callable[[Worker], int | None]:
        """A function that returns how many tokens of the prompt a candidate would have to compute,
        by its predicted cache before this request; None if that is unknown. Text after the compared
        part counts as uncached.
        """
        prefix = self.of("decode").cached_prefix(candidates, requirements)
        if prefix is None:
            prefix = self._own_knowledge().cached_prefix(candidates, requirements)
        text, cached = prefix
        beyond = bytes_beyond(text, requirements)
        if not text or beyond < 0:
            return lambda worker: None
        mark, beyond_tokens = text[:1], beyond // SHORTEST_TOKEN.get(text[:1], BYTES_PER_TOKEN)
        return lambda worker: (
            beyond_tokens + estimate_tokens(mark, text[1 + cached.get(worker, 0) :])
        )

    def record_cached(self, worker: Worker, requirements: Requirements) -> None:
        """The prompt is sent to the decode worker and counts as cached there from now on."""
        if self._knowledge is not None:
            self._knowledge.record_pick(worker, requirements)

    def _own_knowledge(self) -> EventAware:
        if self._knowledge is None:
            self._knowledge = EventAware(self._routing, self._now())
            if self._blocks is not None:
                self._knowledge.use_blocks(self._blocks)
        return self._knowledge

    def _policies(self) -> list[Policy]:
        policies = list(self.built.values())
        return [*policies, self._knowledge] if self._knowledge is not None else policies

    def _build(self, role: Role, before: Policy | None) -> Policy:
        rules = self.rules
        name = rules.prefill_policy if role == "prefill" else rules.decode_policy
        routing = replace(self._routing, policy=name or self._routing.policy)
        policy = build_policy(routing, self._random_below, self._now(), before)
        if self._blocks is not None:
            policy.use_blocks(self._blocks)
        self._share_sessions(role, policy)
        self._share_hints(role, policy)
        if role == "decode" and self._held is not None and isinstance(policy, Sticky):
            policy.hold_for(*self._held)
        return policy

    def _share_sessions(self, role: Role, policy: Policy) -> None:
        if isinstance(policy, Sticky) and self._sessions is not None:
            policy.use_sessions(PrefixedSessions(self._sessions, f"{role}\n"), self._routing)

    def _share_hints(self, role: Role, policy: Policy) -> None:
        if self._hints is not None:
            policy.use_hints(self._hints)
            if isinstance(policy, Sticky):
                policy.share_sessions(self._hints.session_notes, f"{role}\n")


def bytes_beyond(text: bytes, requirements: Requirements) -> int:
    """Bytes of the prompt after the compared text; -1 if not all of the prompt was read."""
    if len(text) < LIMIT:
        return 0
    fields = requirements.body_fields
    if fields is None or requirements.large_body_class or isinstance(fields, KeyedBodyFields):
        return -1
    return max(0, prompt_bytes(fields) - len(text))


def estimate_tokens(mark: bytes, text: bytes) -> int:
    """Estimated number of tokens in these bytes of prefix text; token ids are JSON text."""
    if mark == TOKENS:
        return text.count(b",") + bool(text.strip(b" ,]\r\n\t"))
    return -(-len(text) // BYTES_PER_TOKEN)
