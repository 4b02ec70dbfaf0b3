"""The policy interface: a policy chooses one of the workers that can take a request.

Public: policies of other packages derive from `Policy` (docs/routing.md, "Write your own policy").
Invariants: `candidates` is never empty, and neither the policy nor the caller changes it, so a list
seen before may be recognised by identity. In-flight counts are read from the workers and include
every request that this proxy has sent and not finished. All methods are synchronous, are called
from one thread, must not block, and read no clock: the time is an argument. The keys that `stats`
and `explain_pick` return are the policy's own; the API only shows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.cluster_hints import ClusterHints
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from typing import Self

RandomBelow = Callable[[int], int]  # RandomBelow(n) draws an integer from 0 to n - 1


class Policy(ABC):
    """The base class of all policies. Only `pick` and `preview_pick` are abstract: the defaults of
    the other methods suit a policy without state.

    A policy may read these attributes of a worker: `id`, `url`, `weight` (1 or more), `in_flight`,
    `max_inflight` (0: no limit), `model`, `capabilities` and `weight_version`; it must not set any
    of them. A worker is hashable by identity and is the same object until it leaves the fleet. Of
    the requirements a policy may read `model`, `stream`, `affinity_key` and `body_fields`.
    """

    __slots__ = ()
    name: str  # of a built-in policy; others have the name in the configuration
    # False: `preview_pick` and `explain_pick` are called only for POST /explain.
    explains_itself = True
    # Whether it reads `Requirements.body_fields` of most requests. Otherwise most of them are not
    # decoded before they are read.
    reads_prompts = True
    needs_affinity_key = False  # True: `Requirements.affinity_key` is filled in before a pick

    @classmethod
    def create(cls, routing: RoutingConfig, random_below: RandomBelow, now: float) -> Self:
        """A policy for this configuration. `now` is monotonic seconds, as in `maintain`.

        Also called to check a configuration, so it must have no effect outside the new object.
        Raises any exception if the policy can't work; the configuration is then refused.
        """
        return cls()

    @abstractmethod
    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        """Return the candidate that gets the request. Called once for each attempt."""

    @abstractmethod
    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        """What `pick` would return now, and the reason as text. Must not change any state."""

    def explain_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> dict[str, object]:
        """JSON-serializable facts for POST /explain, in addition to health and load.

        Must not change any state.
        """
        return {}

    def cached_prefix(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[bytes, dict[Worker, int]] | None:
        """The request's text with its leading mark, and by worker how many bytes of it are
        predicted to be cached, if any; None for a policy without predictions. Must not change any
        state."""
        return None

    def record_pick(self, worker: Worker, requirements: Requirements) -> None:  # noqa: B027
        """The worker was chosen by a sticky session: update the state as `pick` does."""

    def forget_worker(self, worker: Worker) -> None:  # noqa: B027
        """The worker left the fleet, or its cache is empty after a restart or flush."""

    def maintain(self, now: float) -> None:  # noqa: B027
        """A short slice of upkeep, called a few times a second. `now` is monotonic seconds."""

    def reconfigure(self, routing: RoutingConfig) -> bool:
        """Apply new parameters and keep all state. Called after each reload that keeps the name of
        the policy; False: a new policy has to be created."""
        return True

    def use_blocks(self, blocks: BlockIndex) -> None:  # noqa: B027
        """From now on `blocks` has the cache contents that engines report."""

    def use_hints(self, hints: ClusterHints) -> None:  # noqa: B027
        """From now on `hints` has what the cluster's other proxies published, and takes what this
        one publishes."""

    @property
    def prefix_tree(self) -> PrefixTree[Worker] | None:
        """The prefixes by worker, if this policy has them; handed over to a new program in an
        upgrade."""
        return None

    def adopt_tree(self, tree: PrefixTree[Worker]) -> None:  # noqa: B027
        """Replace the policy's tree by that of the old program in an upgrade."""

    def stats(self) -> dict[str, object]:
        """JSON-serializable values for `policy` in GET /status."""
        return {}
