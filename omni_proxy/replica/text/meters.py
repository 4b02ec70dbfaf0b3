"""The text stage's counters, and the gauges made of them.

Invariant: totals only grow; a rate is that of the interval since the gauges were last told.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_proxy.replica.text.roster import Roster


@dataclass(slots=True)
class Meters:
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

    def gauges(self, roster: Roster, max_total_tokens: int) -> dict[str, float]:
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
