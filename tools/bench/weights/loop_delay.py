"""The delay of the proxy's event loop during weight updates, and that of a sleeping process.

The second delay is caused by the machine; the difference between both is caused by the proxy. Both
are sampled at the interval of the proxy's metric, over all rounds together.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx

from tools.bench.harness.processes import running

STEP_SECS = 0.05  # as in omni_proxy/telemetry/instruments.py
SHARE = 0.99
LAG = re.compile(r'^\w*event_loop_lag_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)


class Lateness:
    """The delays; only those inside a `watching` block count."""

    def __init__(self, proxy: str, sleeper: subprocess.Popen[str]) -> None:
        self._proxy = proxy
        self._of_loop: Counter[float] = Counter()
        self._of_sleeper: list[float] = []
        self._on = threading.Event()
        self._sleeper = sleeper
        self._reader = threading.Thread(target=self._read, name="bench-lateness", daemon=True)
        self._reader.start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = lags(self._proxy)
        self._on.set()
        try:
            yield
        finally:
            self._on.clear()
        for le, count in lags(self._proxy).items():
            self._of_loop[le] += count - before.get(le, 0)

    def loop_ms(self) -> float:
        """The upper bound of the metric's bucket with the 99th percentile."""
        return 1000 * quantile_bound(self._of_loop)

    def sleeper_ms(self) -> float:
        found = sorted(self._of_sleeper)
        return 1000 * found[int(SHARE * len(found))] if found else float("nan")

    def _read(self) -> None:
        assert self._sleeper.stdout is not None
        for line in self._sleeper.stdout:
            if self._on.is_set():
                self._of_sleeper.append(float(line))


@contextmanager
def lateness_of(proxy: str) -> Iterator[Lateness]:
    with running([sys.executable, "-m", __name__], subprocess.PIPE) as sleeper:
        yield Lateness(proxy, sleeper)


def lags(proxy: str) -> dict[float, int]:
    """Cumulative counts of the loop's delays, by upper bound in seconds."""
    with httpx.Client(timeout=5, trust_env=False) as client:
        text = client.get(f"{proxy}/metrics").text
    return {float(le): int(float(count)) for le, count in LAG.findall(text)}


def quantile_bound(counts: Mapping[float, int]) -> float:
    """The upper bound of the bucket with the quantile; `counts` are cumulative, by bound."""
    total = max(counts.values(), default=0)
    within = [le for le, count in counts.items() if total and count >= SHARE * total]
    return min(within, default=float("nan"))


def main() -> None:
    """Sleep repeatedly; print for each sleep by how many seconds it was too long."""
    never = threading.Event()
    while True:
        due = time.monotonic() + STEP_SECS
        never.wait(STEP_SECS)
        print(time.monotonic() - due, flush=True)


if __name__ == "__main__":
    main()
