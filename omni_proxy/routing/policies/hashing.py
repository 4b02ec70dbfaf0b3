"""Policies that hash a key or a prefix onto a ring of workers.

Invariant: equal candidates, loads and keys give the same worker in every proxy.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.prefix_text import prefix_text
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.least_request import LeastRequest
from omni_proxy.routing.policies.policy import Policy, RandomBelow
from omni_proxy.routing.policies.ring import Rings
from omni_proxy.routing.policies.weighted_load import load_word


class ConsistentHashing(Policy):
    """The key's worker on a ring; while that one is out, the next clockwise.

    Without a key there is nothing to keep together: the least loaded goes.
    """

    __slots__ = ("_keyless", "_rings", "name")
    needs_affinity_key = True

    def __init__(self) -> None:
        self.name = "consistent_hashing"
        self._rings = Rings()
        self._keyless = LeastRequest()

    def pick(self, candidates: Sequence[Worker], need: Requirements) -> Worker:
        if not need.affinity_key:
            return self._keyless.pick(candidates, need)
        return self._owner(candidates, need)

    def preview_pick(self, candidates: Sequence[Worker], need: Requirements) -> tuple[Worker, str]:
        if not need.affinity_key:
            chosen, why = self._keyless.preview_pick(candidates, need)
            return chosen, f"the request has no key, so {why}"
        return self._owner(candidates, need), "the hash of its key belongs there"

    def forget_worker(self, worker: Worker) -> None:
        self._rings.forget_worker(worker)

    def stats(self) -> dict[str, object]:
        return {"rings": len(self._rings)}

    def _owner(self, candidates: Sequence[Worker], need: Requirements) -> Worker:
        return next(
            self._rings.walk(candidates, need.affinity_key.encode("utf-8", "surrogatepass"))
        )


class PrefixHash(Policy):
    """The worker of the text's beginning on a ring, walking on past those above their bound.

    The bound is a share of all in flight, by weight, times `load_factor`; somebody is always below
    it. A request without text goes to the least loaded.
    """

    __slots__ = ("_factor", "_length", "_passed_over", "_rings", "_textless", "name")

    @classmethod
    def create(cls, routing: RoutingConfig, random_below: RandomBelow, now: float) -> PrefixHash:
        return cls(routing)

    def __init__(self, routing: RoutingConfig) -> None:
        self.name = "prefix_hash"
        self._rings = Rings()
        self._textless = LeastRequest()
        self._passed_over = 0
        self._take(routing)

    def _take(self, routing: RoutingConfig) -> None:
        self._length = routing.prefix_hash.prefix_length
        self._factor = routing.prefix_hash.load_factor

    def reconfigure(self, routing: RoutingConfig) -> bool:
        self._take(routing)
        return True

    def pick(self, candidates: Sequence[Worker], need: Requirements) -> Worker:
        text = prefix_text(need.body_fields, self._length)
        if not text:
            return self._textless.pick(candidates, need)
        chosen, skipped = self._below_bound(candidates, text)
        self._passed_over += bool(skipped)
        return chosen

    def preview_pick(self, candidates: Sequence[Worker], need: Requirements) -> tuple[Worker, str]:
        text = prefix_text(need.body_fields, self._length)
        if not text:
            chosen, why = self._textless.preview_pick(candidates, need)
            return chosen, f"the request has no text, so {why}"
        chosen, skipped = self._below_bound(candidates, text)
        if not skipped:
            return chosen, "the hash of its beginning belongs there"
        names = ", ".join(f"{worker.display_id} ({load_word(worker)})" for worker in skipped)
        return chosen, f"next on the ring after {names} above the bound"

    def forget_worker(self, worker: Worker) -> None:
        self._rings.forget_worker(worker)

    def stats(self) -> dict[str, object]:
        return {"rings": len(self._rings), "passed_over": self._passed_over}

    def _below_bound(
        self, candidates: Sequence[Worker], text: bytes
    ) -> tuple[Worker, list[Worker]]:
        total = sum(worker.in_flight for worker in candidates) + 1
        per_weight = total * self._factor / sum(worker.weight for worker in candidates)
        skipped: list[Worker] = []
        for worker in self._rings.walk(candidates, text):
            if worker.in_flight <= per_weight * worker.weight:
                return worker, skipped
            skipped.append(worker)
        raise AssertionError("every load lies above the mean of all loads")
