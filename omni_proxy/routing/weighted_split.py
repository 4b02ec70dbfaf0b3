"""A weighted choice among the targets of a model alias.

Invariants: over `sum(weights)` choices with all targets available, the number of choices of a
target is its weight, evenly spread (nginx's smooth weighted round robin). A session's order of
targets depends only on its key, the targets and their weights, so it is the same in every process,
and a changed weight moves no more sessions than necessary (weighted rendezvous hashing, Thaler and
Ravishankar 1998). Pure: uses neither randomness nor a clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import log
from typing import Final

import msgspec

from omni_proxy.config.schema import ModelAlias

_POINTS: Final = 1 << 52


class Split:
    """The targets of the alias `name`: models with weights."""

    __slots__ = ("_credits", "models", "name", "rewrite", "weights")

    def __init__(self, entry: ModelAlias, previous: Split | None = None) -> None:
        """`previous`: the split before a reload; with equal targets its state is kept."""
        self.name = entry.name
        self.rewrite = entry.rewrite
        self.models = tuple(target.model for target in entry.targets)
        self.weights = tuple(target.weight for target in entry.targets)
        # By target: the part of its share that it has not received yet.
        self._credits = [0] * len(self.models)
        if previous is not None and previous._targets == self._targets:
            self._credits = previous._credits

    @property
    def _targets(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.models, self.weights

    def choose(self, available: Sequence[int]) -> int:
        """The next target out of `available`; all are indices."""
        chosen = self.preview(available)
        for index in available:
            self._credits[index] += self.weights[index]
        self._credits[chosen] -= sum(self.weights[index] for index in available)
        return chosen

    def preview(self, available: Sequence[int]) -> int:
        """What `choose` would return now; changes nothing."""
        return max(available, key=lambda index: self._credits[index] + self.weights[index])

    def session_order(self, session: str) -> list[int]:
        """Indices of all targets in the session's order of preference."""
        key = session.encode("utf-8", "surrogatepass")
        scores = [
            log(_point(model, key)) / weight
            for model, weight in zip(self.models, self.weights, strict=True)
        ]
        return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


class AliasRequirement(msgspec.Struct, gc=False):
    """State of a request that names the alias `split`. `session`: its affinity key, or ""."""

    split: Split
    session: str = ""
    target: int = -1  # index of the present or last attempt's target; -1 before the first attempt
    spans: list[tuple[int, int]] | None = None  # of the alias in the body; None: not searched yet

    @property
    def model(self) -> str | None:
        """The target's model; None before the first attempt."""
        return None if self.target < 0 else self.split.models[self.target]


def _point(model: str, key: bytes) -> float:
    """A number above 0 and below 1, evenly distributed over keys."""
    text = model.encode("utf-8", "surrogatepass") + b"\0" + key
    digest = hashlib.blake2b(text, digest_size=8).digest()
    # 52 bits plus one half are exact in a double, so the result is never 0 or 1.
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) / _POINTS
