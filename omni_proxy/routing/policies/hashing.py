"""Policies that hash a key or a prefix onto a consistent-hash ring of workers.

A ring consists of points of workers on a circle of 64-bit numbers. Invariants: a worker's points
depend only on its URL and weight, so equal candidates give the same ring in every process, and a
worker that joins or leaves moves only the keys of its own arcs; equal candidates, loads and keys
give the same worker in every proxy.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.prefix_text import prefix_text
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.least_request import LeastRequest, load_of, load_word
from omni_proxy.routing.policies.policy import Policy, RandomBelow

PLACES = 150  # points of a worker of weight 1
MAX_PLACES = 1 << 15  # points of a ring above which heavy workers get fewer points per weight
RINGS = 32
WORKERS_REMEMBERED = 1024
WIDER = 4  # a ring of up to this many times the candidates is walked instead of rebuilt


def point(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


class Ring:
    """The order of these workers for each key."""

    __slots__ = ("_owner_of", "_points", "plain", "weights")

    def __init__(
        self, weights: dict[Worker, int], positions: Sequence[list[int]], unit: int
    ) -> None:
        self.weights = weights
        self.plain = unit == 1  # a ring of some of these workers would have the same points
        self._owner_of = {
            position: worker
            for worker, of_one in zip(weights, positions, strict=True)
            for position in of_one
        }
        self._points = sorted(self._owner_of)

    def __len__(self) -> int:
        """The number of points."""
        return len(self._points)

    def from_key(self, key: bytes) -> Iterator[Worker]:
        """Each worker once, clockwise from the key's point."""
        points, count = self._points, len(self._points)
        index = bisect_left(points, point(key))
        visited: set[Worker] = set()
        for step in range(index, index + count):
            worker = self._owner_of[points[step % count]]
            if worker not in visited:
                visited.add(worker)
                yield worker
                if len(visited) == len(self.weights):
                    return

    def serves(self, candidates: Sequence[Worker]) -> bool:
        """Whether this ring, with other workers skipped, gives the same order as the ring of
        `candidates`, and is not too large."""
        part = len(self.weights) != len(candidates)
        if part and (not self.plain or len(self.weights) > len(candidates) * WIDER):
            return False
        return all(self.weights.get(worker) == worker.weight for worker in candidates)


class Rings:
    """The recent rings, by their members."""

    __slots__ = ("_last", "_of_last", "_places", "_rings")

    def __init__(self) -> None:
        self._rings: OrderedDict[tuple[Worker, ...], Ring] = OrderedDict()
        self._places: dict[tuple[str, int], list[int]] = {}
        self._of_last: Sequence[Worker] | None = None
        self._last: Ring | None = None

    def walk(self, candidates: Sequence[Worker], key: bytes) -> Iterator[Worker]:
        """The candidates clockwise from the key's point."""
        if candidates is not self._of_last or self._last is None:
            self._last = self._ring(candidates)
            self._of_last = candidates
        walk = self._last.from_key(key)
        if len(self._last.weights) == len(candidates):
            return walk
        among = set(candidates)
        return (worker for worker in walk if worker in among)

    def forget_worker(self, worker: Worker) -> None:
        for members in [members for members in self._rings if worker in members]:
            del self._rings[members]
        for key in [key for key in self._places if key[0] == worker.url]:
            del self._places[key]
        self._of_last = self._last = None

    def __len__(self) -> int:
        return len(self._rings)

    @property
    def points(self) -> int:
        """The points of all rings together."""
        return sum(map(len, self._rings.values()))

    def _ring(self, candidates: Sequence[Worker]) -> Ring:
        """The ring of these candidates, or of a larger set: while workers become full and free,
        there are more sets of candidates than rings can be kept."""
        members = tuple(sorted(candidates, key=lambda worker: worker.url))
        cached = self._rings.get(members)
        if cached is not None and cached.serves(members):
            self._rings.move_to_end(members)
            return cached
        for ring in reversed(self._rings.values()):
            if ring.serves(members):
                return ring
        return self._build(members)

    def _build(self, members: tuple[Worker, ...]) -> Ring:
        weights = {worker: worker.weight for worker in members}
        unit = _unit(list(weights.values()))
        positions = [self._places_of(worker, unit) for worker in members]
        ring = self._rings[members] = Ring(weights, positions, unit)
        self._rings.move_to_end(members)
        if len(self._rings) > RINGS:
            self._rings.popitem(last=False)
        return ring

    def _places_of(self, worker: Worker, unit: int) -> list[int]:
        count = max(1, PLACES * worker.weight // unit)
        key = (worker.url, count)
        positions = self._places.get(key)
        if positions is None:
            if len(self._places) >= WORKERS_REMEMBERED:
                self._places.clear()
            positions = self._places[key] = _places(worker.url, count)
        return positions


def _unit(weights: Sequence[int]) -> int:
    """The weight that gets `PLACES` points; above 1 only if the ring would become too large. It is
    a power of two, so that few changes of the fleet change it: each such change moves many keys."""
    unit = 1
    while unit < max(weights) and sum(weights) * PLACES > MAX_PLACES * unit:
        unit *= 2
    return unit


def _places(url: str, count: int) -> list[int]:
    positions: list[int] = []
    number = 0
    while len(positions) < count:
        digest = hashlib.blake2b(f"{url}#{number}".encode()).digest()
        positions += (int.from_bytes(digest[index : index + 8], "big") for index in range(0, 64, 8))
        number += 1
    return positions[:count]


class ConsistentHashing(Policy):
    """The key's worker on a ring; if that is no candidate, the next one clockwise.

    A request without a key goes to the least loaded worker.
    """

    reads_prompts = False
    __slots__ = ("_keyless", "_rings", "name")
    needs_affinity_key = True

    def __init__(self) -> None:
        self.name = "consistent_hashing"
        self._rings = Rings()
        self._keyless = LeastRequest()

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        if not requirements.affinity_key:
            return self._keyless.pick(candidates, requirements)
        return self._owner(candidates, requirements)

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        if not requirements.affinity_key:
            picked, reason = self._keyless.preview_pick(candidates, requirements)
            return picked, f"the request has no key, so {reason}"
        return self._owner(candidates, requirements), "chosen by the hash of its key"

    def forget_worker(self, worker: Worker) -> None:
        self._rings.forget_worker(worker)

    def stats(self) -> dict[str, object]:
        return {"rings": len(self._rings)}

    def _owner(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        return next(
            self._rings.walk(candidates, requirements.affinity_key.encode("utf-8", "surrogatepass"))
        )


class PrefixHash(Policy):
    """The worker of the text's prefix on a ring; workers above their bound are skipped.

    The bound is a worker's share of all requests in flight, by weight, times `load_factor`; at
    least one worker is below it. A request without text goes to the least loaded worker.
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
        self._set_rules(routing)

    def _set_rules(self, routing: RoutingConfig) -> None:
        self._length = routing.prefix_hash.prefix_length
        self._factor = routing.prefix_hash.load_factor

    def reconfigure(self, routing: RoutingConfig) -> bool:
        self._set_rules(routing)
        return True

    def pick(self, candidates: Sequence[Worker], requirements: Requirements) -> Worker:
        text = prefix_text(requirements.body_fields, self._length)
        if not text:
            return self._textless.pick(candidates, requirements)
        picked, skipped = self._below_bound(candidates, text)
        self._passed_over += bool(skipped)
        return picked

    def preview_pick(
        self, candidates: Sequence[Worker], requirements: Requirements
    ) -> tuple[Worker, str]:
        text = prefix_text(requirements.body_fields, self._length)
        if not text:
            picked, reason = self._textless.preview_pick(candidates, requirements)
            return picked, f"the request has no text, so {reason}"
        picked, skipped = self._below_bound(candidates, text)
        if not skipped:
            return picked, "chosen by the hash of its prefix"
        names = ", ".join(f"{worker.display_id} ({load_word(worker)})" for worker in skipped)
        return picked, f"next on the ring after {names} above the bound"

    def forget_worker(self, worker: Worker) -> None:
        self._rings.forget_worker(worker)

    def stats(self) -> dict[str, object]:
        return {"rings": len(self._rings), "passed_over": self._passed_over}

    def _below_bound(
        self, candidates: Sequence[Worker], text: bytes
    ) -> tuple[Worker, list[Worker]]:
        total = sum(map(load_of, candidates)) + 1
        per_weight = total * self._factor / sum(worker.weight for worker in candidates)
        skipped: list[Worker] = []
        for worker in self._rings.walk(candidates, text):
            if load_of(worker) <= per_weight * worker.weight:
                return worker, skipped
            skipped.append(worker)
        # Loads may be negative for a moment, until the counts of the cluster follow their offsets.
        return min(candidates, key=load_of), skipped
