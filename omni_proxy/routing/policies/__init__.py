"""The policies: each is one object with one method, `pick`.

Contract: `candidates` is never empty and is not changed; in-flight counts are read from the
workers, so a pick is only as good as the door's accounts. `build` is the one place that knows the
names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.policies.load import LeastRequest, PowerOfTwo
from omni_proxy.routing.policies.turn import Random, RoundRobin

Below = Callable[[int], int]  # Below(n) draws from 0..n-1


class Policy(Protocol):
    """Chooses one of the workers that may take a request."""

    name: str

    def pick(self, candidates: Sequence[Worker]) -> Worker: ...


def build(name: str, below: Below) -> Policy:
    """Raises KeyError for a name that no policy has (the configuration refuses it earlier)."""
    makers: dict[str, Callable[[], Policy]] = {
        "round_robin": RoundRobin,
        "random": lambda: Random(below),
        "least_request": LeastRequest,
        "power_of_two": lambda: PowerOfTwo(below),
    }
    return makers[name]()
