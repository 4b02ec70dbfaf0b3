"""What a policy is: it chooses one of the workers that may take a request.

Contract: `candidates` is never empty and is not changed, neither by the policy nor, once handed
over, by the caller; in-flight counts are read from the workers, so a pick is only as good as the
door's accounts. All methods are synchronous atoms; none reads a clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements

RandomBelow = Callable[[int], int]  # RandomBelow(n) draws from 0..n-1


class Policy(ABC):
    """The base of all policies. What is not abstract here is what one without a memory does."""

    __slots__ = ()
    name: str
    needs_affinity_key = False  # whether `Requirements.key` must be filled in before a pick

    @abstractmethod
    def pick(self, candidates: Sequence[Worker], need: Requirements) -> Worker: ...

    @abstractmethod
    def preview_pick(self, candidates: Sequence[Worker], need: Requirements) -> tuple[Worker, str]:
        """What `pick` would do now and why, in words; it spends no turn and records nothing."""

    def explain_pick(self, candidates: Sequence[Worker], need: Requirements) -> dict[str, object]:
        """JSON-able: what a preview is based on, beside health and loads."""
        return {}

    def tune(self, routing: RoutingConfig) -> bool:
        """Take new parameters and keep all state; False: `build` must make what is asked for."""
        return self.reconfigure(routing) and not routing.sticky_sessions

    def reconfigure(self, routing: RoutingConfig) -> bool:
        """`tune`, with sessions left out of account."""
        return routing.policy == self.name

    def record_pick(self, worker: Worker, need: Requirements) -> None:  # noqa: B027
        """Somebody else sent the request there: remember what `pick` would have remembered."""

    def forget_worker(self, worker: Worker) -> None:  # noqa: B027
        """It is gone, was restarted or flushed: what it had in its cache is no more."""

    def maintain(self, now: float) -> None:  # noqa: B027
        """A short piece of upkeep, called a few times a second. `now` is monotonic seconds."""

    def stats(self) -> dict[str, object]:
        """JSON-able, for GET /status."""
        return {}
