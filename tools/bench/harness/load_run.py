"""One leg: start a side, wait until it is ready, load it for a bounded time, measure and end it."""

import http.client
import json
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tools.bench.harness.build import build
from tools.bench.harness.processes import cpu_secs, rss_mib, running
from tools.bench.harness.proxies import Place, Side, free_port
from tools.bench.harness.tls import bridge

WORKERS = 8
WARM_MS = 700  # excludes the first events of streams and the interpreter's warm-up
READY_SECS = 30.0
READY_ANSWERS = 2 * WORKERS
# A sampled trace for the first request, so that tracing is initialized before the load.
SAMPLED = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
FIRST = b'{"model":"bench","messages":[{"role":"user","content":"#bench first 0 0#"}]}'
KEY = "bench"  # the key in the load's requests; see load_generator.c
LOG_TAIL_LINES = 8  # lines
REST_SECS = 0.4
REST_SHARE = 0.1  # of one core: probes continue


class LegError(Exception):
    """A process of this leg failed; the message has its name and output."""


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    mode: str  # unary | unique | stream | idle
    connections: int
    gap_ms: int = 0
    also_bare: bool = False  # also measured without a proxy, for the latency that a proxy adds
    warm_ms: int = WARM_MS

    def argv(self, port: int, measured_ms: int) -> list[str]:
        shape = [self.mode, port, self.connections, self.warm_ms, measured_ms, self.gap_ms]
        return [str(build("load_generator")), *map(str, shape)]


LOADS = (
    Load("unary c=1", "unary", 1, also_bare=True),
    Load("unary c=32", "unary", 32),
    Load("unary c=256", "unary", 256),
    Load("stream 1k/s", "stream", 100, gap_ms=100),
    Load("stream 17k/s", "stream", 170, gap_ms=10),
    Load("stream 50k/s", "stream", 500, gap_ms=10),
)
QUICK = ("unary c=32", "stream 17k/s")


@dataclass(frozen=True, slots=True)
class Leg:
    """The measurements of a leg. A unit is a request or a streamed event."""

    load: str
    side: str
    cpu_us: float | None  # per unit; None without a proxy
    rss_mib: float | None
    units: int
    per_sec: float
    reads_per_unit: float
    p50_us: float  # from request to complete answer; of an event, from its creation to its arrival
    p99_us: float
    gap_p99_us: float  # between two reads of a stream
    errors: int
    first_error: str


@contextmanager
def fake_worker(count: int = WORKERS) -> Iterator[list[int]]:
    """Start a process with `count` workers; yields their ports."""
    with running([str(build("fake_worker")), str(count)], subprocess.PIPE) as process:
        assert process.stdout is not None
        ports = [int(word) for word in process.stdout.readline().split()]
        if len(ports) != count:
            raise LegError("the fake worker did not start")
        yield ports


@contextmanager
def started(side: Side, workers: list[int]) -> Iterator[tuple[int, int | None]]:
    """Start a side; yields its port and, if it is a proxy, its process id when it answers."""
    workers = workers[: side.max_workers]
    if side.command is None:
        yield workers[0], None
        return
    with tempfile.TemporaryDirectory(prefix="omni-proxy-bench-") as folder:
        place = Place(free_port(), workers, Path(folder))
        log = place.folder / "log"
        with ExitStack() as stack:
            out = stack.enter_context(log.open("w"))
            process = stack.enter_context(running(side.command(place), out))
            port = place.port
            if side.secure:
                port = free_port()
                stack.enter_context(bridge(port, place.port, place.folder))
            _wait_ready(side, port, process, log)
            _wait_settled(port, len(workers), process)
            _wait_at_rest(process)
            yield port, process.pid


def run_leg(side: Side, load: Load, workers: list[int], measured_secs: float) -> Leg:
    with started(side, workers) as (port, pid):
        argv = load.argv(port, round(1000 * measured_secs))
        with running(argv, subprocess.PIPE) as process:
            assert process.stdout is not None
            cpu, rss, reported = _follow(process.stdout, pid)
    if not reported.startswith("{"):
        raise LegError(f"the load generator ended early on {load.name} through {side.name}")
    seen = json.loads(reported)
    units = seen["units"]
    return Leg(
        load=load.name,
        side=side.name,
        cpu_us=1e6 * cpu / units if pid is not None and units else None,
        rss_mib=rss if pid is not None else None,
        units=units,
        per_sec=seen["per_sec"],
        reads_per_unit=seen["reads"] / units if units else 0.0,
        **{key: seen[key] for key in ("p50_us", "p99_us", "gap_p99_us", "errors", "first_error")},
    )


def _follow(reported: Iterable[str], pid: int | None) -> tuple[float, float, str]:
    """The proxy's CPU seconds in the load's window, its memory at the end, and the last line."""
    cpu = rss = 0.0
    last = ""
    for line in reported:
        last = line.strip()
        if pid is None:
            continue
        if last == "window_opened":
            cpu -= cpu_secs(pid)
        elif last == "window_closed":
            cpu += cpu_secs(pid)
            rss = rss_mib(pid)
    return cpu, rss, last


def _refusal(port: int) -> str:
    """Why the first request fails; empty if it succeeds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        fields = {
            "content-type": "application/json",
            "authorization": f"Bearer {KEY}",
            "traceparent": SAMPLED,
        }
        connection.request("POST", "/v1/chat/completions", FIRST, fields)
        answer = connection.getresponse()
        right = answer.status == 200 and b"chatcmpl-first" in answer.read()
        return "" if right else f"status {answer.status}"
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()


def _wait_settled(port: int, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until the proxy has probed all workers, because probes cost CPU, too."""
    give_up_at = time.monotonic() + READY_SECS
    while time.monotonic() < give_up_at and not all(
        _settled(port, path, count) for path in ("/health", "/workers")
    ):
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)


def _wait_at_rest(process: subprocess.Popen[str]) -> None:
    """Wait until the proxy is idle, so that start-up work of a large fleet is not measured."""
    give_up_at = time.monotonic() + READY_SECS
    busy = True
    while busy and time.monotonic() < give_up_at and process.poll() is None:
        before = cpu_secs(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(REST_SECS)
        busy = process.poll() is None and cpu_secs(process.pid) - before > REST_SHARE * REST_SECS


def _settled(port: int, path: str, count: int) -> bool:
    """Whether the proxy has probed `count` workers; True if it has no such status path."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        reported = json.loads(connection.getresponse().read())
        if path == "/health":
            return bool(reported["routable_workers"] == reported["total_workers"])
        return [worker["is_healthy"] for worker in reported["workers"]] == [True] * count
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return True
    finally:
        connection.close()


def _wait_ready(side: Side, port: int, process: subprocess.Popen[str], log: Path) -> None:
    give_up_at = time.monotonic() + READY_SECS
    in_a_row = 0
    while in_a_row < READY_ANSWERS:
        refusal = _refusal(port)
        if not refusal:
            in_a_row += 1
            continue
        in_a_row = 0
        try:
            code = process.wait(0.05)
        except subprocess.TimeoutExpired:
            if time.monotonic() < give_up_at:
                continue
            verdict = f"gave no answer within {READY_SECS:.0f} s ({refusal})"
        else:
            verdict = f"ended with status {code} before it answered"
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        quoted = "\n  ".join(line[:200] for line in lines)
        raise LegError(f"{side.name} {verdict}; its last output:\n  {quoted}")
