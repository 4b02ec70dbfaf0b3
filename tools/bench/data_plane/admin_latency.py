"""The latency of control requests while model traffic saturates the proxy.

One client sends GET /workers a hundred times a second; 32 others send requests as fast as they can.
"""

import http.client
import threading
import time
from dataclasses import dataclass
from statistics import quantiles
from subprocess import DEVNULL

from tools.bench.harness.load_run import LegError, Load, fake_worker, started
from tools.bench.harness.processes import running
from tools.bench.harness.proxies import Side

PATH = "/workers"
PACE_SECS = 0.01
MIN_ANSWERS = 50  # answers; fewer have no meaningful 99th percentile
BESIDE = Load("unary c=32", "unary", 32)


@dataclass(frozen=True, slots=True)
class Waits:
    """Milliseconds from a request to its complete answer."""

    side: str
    count: int
    p50_ms: float
    p99_ms: float
    idle_p50_ms: float  # without other traffic
    idle_p99_ms: float


def admin_waits(side: Side, secs: float) -> Waits:
    """Raises LegError."""
    with fake_worker() as workers, started(side, workers) as (port, _):
        alone = _ask(port, min(secs, 2.0))
        with running(BESIDE.argv(port, round(1000 * (secs + 1))), DEVNULL):
            threading.Event().wait(BESIDE.warm_ms / 1000)
            beside = _ask(port, secs)
    return Waits(side.name, len(beside), *_quantiles(beside), *_quantiles(alone))


def _quantiles(secs: list[float]) -> tuple[float, float]:
    if len(secs) < MIN_ANSWERS:
        raise LegError(f"only {len(secs)} answers to GET {PATH}: measure longer (--secs)")
    cuts = quantiles(secs, n=100, method="inclusive")
    return 1000 * cuts[49], 1000 * cuts[98]


def _ask(port: int, secs: float) -> list[float]:
    found = []
    pace = threading.Event()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    over = time.perf_counter() + secs
    try:
        while (begun := time.perf_counter()) < over:
            connection.request("GET", PATH)
            answer = connection.getresponse()
            reported = answer.read()
            if answer.status != 200 or b'"workers"' not in reported:
                raise LegError(f"GET {PATH} was answered with {answer.status}: {reported[:80]!r}")
            found.append(time.perf_counter() - begun)
            pace.wait(max(0.0, begun + PACE_SECS - time.perf_counter()))
    except (OSError, http.client.HTTPException) as error:
        raise LegError(f"GET {PATH} got no answer: {error}") from error
    finally:
        connection.close()
    return found
