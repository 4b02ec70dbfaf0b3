"""The batch queue: waiting and running sequences, the next batch, and the gauges of both.

Invariant: running sequences never hold more than `max_total_tokens` tokens, unless one runs alone.
First in, first out: later sequences start later and are retracted first. Every running sequence
that decodes is in every batch; prefills share `prefill_chunk` tokens of it. Totals only grow; a
rate covers the interval since the gauges were last reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from omni_proxy.replica.text.sequence import Sequence

# Tokens that admission leaves free for each running sequence to grow, to avoid early retractions.
HEADROOM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds on running sequences, on their tokens together, and on prefill tokens of a batch."""

    max_running: int
    max_total_tokens: int
    prefill_chunk: int


class BatchQueue:
    """Waiting and running sequences. The caller gives each admitted sequence its KV."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def used_tokens(self) -> int:
        """Tokens whose keys and values are in memory."""
        return sum(sequence.computed for sequence in self.running)

    def find(self, request_id: str) -> Sequence | None:
        return next((sequence for sequence in self if sequence.request_id == request_id), None)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def clear(self) -> None:
        self.running.clear()
        self.waiting.clear()

    def admit(self) -> list[Sequence]:
        """Move the sequences that may start from waiting to running; return them."""
        admitted = []
        while self.waiting and self._has_room_for(self.waiting[0]):
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def retract(self, keep: int = 0) -> int:
        """Move all but the first `keep` running sequences to the front of the queue, in order."""
        retracted = self.running[keep:]
        del self.running[keep:]
        self.waiting.extendleft(reversed(retracted))
        for sequence in retracted:
            sequence.drop_kv()
        return len(retracted)

    def batch(self) -> list[tuple[Sequence, int]]:
        """Choose how many pending tokens of which running sequences are computed next."""
        while len(self.running) > 1 and self._committed() > self._limits.max_total_tokens:
            self.retract(keep=len(self.running) - 1)
        decoding = [(running, 1) for running in self.running if running.pending == 1]
        prefilling, prefill_budget = [], self._limits.prefill_chunk
        for sequence in self.running:
            if sequence.pending > 1 and prefill_budget:
                prefilling.append((sequence, min(sequence.pending, prefill_budget)))
                prefill_budget -= prefilling[-1][1]
        return decoding + prefilling

    def _committed(self) -> int:
        """Tokens of the running sequences, computed or pending."""
        return sum(len(sequence.tokens) for sequence in self.running)

    def _has_room_for(self, sequence: Sequence) -> bool:
        if not self.running:
            return True
        if len(self.running) >= self._limits.max_running:
            return False
        headroom = HEADROOM_TOKENS * (len(self.running) + 1)
        needed = self._committed() + len(sequence.tokens) + headroom
        return needed <= self._limits.max_total_tokens


# Counters of the text stage, and the gauges computed from them.


@dataclass(slots=True)
class SchedulerMetrics:
    """Totals since the start; `reported_s` is when the gauges were last reported."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    aborted: int = 0
    reported_s: float = 0.0
    _reported_tokens: int = 0

    def throughput(self, now_s: float) -> float:
        """Tokens generated per second since the last call."""
        tokens, seconds = self.generation_tokens - self._reported_tokens, now_s - self.reported_s
        self._reported_tokens, self.reported_s = self.generation_tokens, now_s
        return tokens / seconds if seconds > 0 else 0.0

    def gauges(self, batch_queue: BatchQueue, max_total_tokens: int) -> dict[str, float]:
        """All gauges but throughput and pause, under sglang's names."""
        used = batch_queue.used_tokens
        return {
            "num_running_reqs": float(len(batch_queue.running)),
            "num_waiting_reqs": float(len(batch_queue.waiting)),
            "token_usage": used / max_total_tokens,
            "cache_hit_rate": self.cached_tokens / max(self.prompt_tokens, 1),
            "num_used_tokens": float(used),
            "max_total_num_tokens": float(max_total_tokens),
            "prompt_tokens_total": float(self.prompt_tokens),
            "generation_tokens_total": float(self.generation_tokens),
            "cached_tokens_total": float(self.cached_tokens),
            "aborted_total": float(self.aborted),
        }
