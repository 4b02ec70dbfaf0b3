"""Who is computed next: sequences that wait, sequences that run, and the batch made of them.

Invariant: those running never hold more than `max_total_tokens` tokens, unless one runs alone.
First come first served: who arrived later starts later and is the first to give way. Each running
sequence that decodes is in every batch; prefills share `prefill_chunk` tokens of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from omni_proxy.replica.text.sequence import Sequence

# Room for growth that an admission leaves to everyone, so that it isn't taken back at once.
HEADROOM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What may be computed at once."""

    max_running: int
    max_total_tokens: int
    prefill_chunk: int


class BatchQueue:
    """Waiting and running sequences. The caller gives each admitted one its KV."""

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
        """Tokens whose keys and values are held now."""
        return sum(sequence.computed for sequence in self.running)

    def find(self, request_id: str) -> Sequence | None:
        return next((each for each in self if each.request_id == request_id), None)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def clear(self) -> None:
        self.running.clear()
        self.waiting.clear()

    def admit(self) -> list[Sequence]:
        """Move those who may start from waiting to running; return them."""
        admitted = []
        while self.waiting and self._has_room_for(self.waiting[0]):
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def retract(self, keep: int = 0) -> int:
        """Send all but the first `keep` running back to the head of the queue, in their order."""
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
        decoding = [(each, 1) for each in self.running if each.pending == 1]
        prefilling, left = [], self._limits.prefill_chunk
        for sequence in self.running:
            if sequence.pending > 1 and left:
                prefilling.append((sequence, min(sequence.pending, left)))
                left -= prefilling[-1][1]
        return decoding + prefilling

    def _committed(self) -> int:
        """Tokens held once all that is known of the running sequences is computed."""
        return sum(len(sequence.tokens) for sequence in self.running)

    def _has_room_for(self, sequence: Sequence) -> bool:
        if not self.running:
            return True
        if len(self.running) >= self._limits.max_running:
            return False
        headroom = HEADROOM_TOKENS * (len(self.running) + 1)
        wanted = self._committed() + len(sequence.tokens) + headroom
        return wanted <= self._limits.max_total_tokens


# The text stage's counters, and the gauges made of them.
#
# Invariant: totals only grow; a rate is that of the interval since the gauges were last told.


@dataclass(slots=True)
class SchedulerMetrics:
    """Totals since the start; `told_s` is the clock's time at which gauges were last told."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    aborted: int = 0
    told_s: float = 0.0
    _told_tokens: int = 0

    def throughput(self, now_s: float) -> float:
        """Tokens generated per second since the last call."""
        tokens, seconds = self.generation_tokens - self._told_tokens, now_s - self.told_s
        self._told_tokens, self.told_s = self.generation_tokens, now_s
        return tokens / seconds if seconds > 0 else 0.0

    def gauges(self, roster: BatchQueue, max_total_tokens: int) -> dict[str, float]:
        """All gauges but the throughput and the pause, under sglang's names."""
        used = roster.used_tokens
        return {
            "num_running_reqs": float(len(roster.running)),
            "num_waiting_reqs": float(len(roster.waiting)),
            "token_usage": used / max_total_tokens,
            "cache_hit_rate": self.cached_tokens / max(self.prompt_tokens, 1),
            "num_used_tokens": float(used),
            "max_total_num_tokens": float(max_total_tokens),
            "prompt_tokens_total": float(self.prompt_tokens),
            "generation_tokens_total": float(self.generation_tokens),
            "cached_tokens_total": float(self.cached_tokens),
            "aborted_total": float(self.aborted),
        }
