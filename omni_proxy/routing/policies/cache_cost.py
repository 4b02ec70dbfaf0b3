"""The cost model of cache_aware: the cost of a prompt at each worker, in prompt tokens.

    cost = (uncached_weight * uncached + backlog + request_cost_tokens * in_flight) / weight

`uncached`: tokens of this prompt that the worker has to compute. `backlog`: uncached tokens of
prompts that were sent to it and have no first byte yet. Each request in flight counts as
`request_cost_tokens`. The lowest cost wins; docs/routing.md derives the formula. Invariant: a
choice changes no state; it compares all workers that have some of the prompt cached, and at most
`EXACT` others in rotation. Bytes are converted to tokens by a mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from omni_proxy.config.schema import CacheAwareConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.cache_prediction import CacheReports
from omni_proxy.routing.inspect.prefix_text import LIMIT, prompt_bytes
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.least_request import load_of

EXACT: Final = 64  # more candidates are not all compared for each pick
BYTES_PER_TOKEN: Final = 4  # mean of UTF-8 text, for English and code


def count_prompt_tokens(length: int, requirements: Requirements) -> int:
    """Tokens of a prompt, estimated from `length`, the bytes of its text after a cut at `LIMIT`."""
    if length >= LIMIT - 1 and requirements.body_fields is not None:
        length = max(length, prompt_bytes(requirements.body_fields))
    return -(-length // BYTES_PER_TOKEN)


def uncached_tokens(tokens: int, cached_bytes: int) -> int:
    """Uncached tokens of a prompt of `tokens` tokens, if `cached_bytes` of its text are cached."""
    return max(0, tokens - cached_bytes // BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """`tokens`: length of the prompt. `cached_bytes`: of its text, for workers that have any.
    `rules`: the weights of the cost."""

    tokens: int
    cached_bytes: Mapping[Worker, int]
    reports: Mapping[Worker, CacheReports]
    rules: CacheAwareConfig

    def terms(self, worker: Worker) -> dict[str, int]:
        """The summands of the worker's cost, before `uncached_weight` and the worker's weight."""
        reports = self.reports.get(worker)
        return {
            "uncached_tokens": self.uncached(worker),
            "backlog_tokens": reports.backlog if reports is not None else 0,
            "in_flight_tokens": round(self.rules.request_cost_tokens * load_of(worker)),
        }

    def uncached(self, worker: Worker) -> int:
        return uncached_tokens(self.tokens, self.cached_bytes.get(worker, 0))

    def of(self, workers: Collection[Worker]) -> list[float]:
        """The cost at each worker, in their order."""
        cached_bytes, reports, request_cost = (
            self.cached_bytes,
            self.reports,
            self.rules.request_cost_tokens,
        )
        factor, tokens = self.rules.uncached_weight, self.tokens
        costs: list[float] = []
        for worker in workers:
            uncached = (
                uncached_tokens(tokens, cached_bytes[worker]) if worker in cached_bytes else tokens
            )
            # inlined: load_of
            cost = factor * uncached + request_cost * (worker.in_flight + worker.load_offset)
            report = reports.get(worker)
            if report is not None:
                cost += report.backlog
            costs.append(cost / worker.weight)
        return costs


def cheapest(cost: PromptCost, candidates: Sequence[Worker], turn: int) -> tuple[Worker, int]:
    """The worker with the lowest cost, and how many have that cost; `turn` rotates among these."""
    if len(candidates) > EXACT:
        candidates = _sample(cost, candidates, turn)
    costs = cost.of(candidates)
    lowest = min(costs)
    ties = [
        worker
        for worker, worker_cost in zip(candidates, costs, strict=True)
        if worker_cost == lowest
    ]
    return ties[turn % len(ties)], len(ties)


def _sample(cost: PromptCost, candidates: Sequence[Worker], turn: int) -> list[Worker]:
    start = turn * EXACT % len(candidates)
    others = [*candidates[start : start + EXACT], *candidates[:EXACT]]
    return list(dict.fromkeys([*cost.cached_bytes, *others[:EXACT]]))
