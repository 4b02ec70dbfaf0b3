"""Compares `omni-proxy simulate` with a calibrated engine to four llama.cpp replicas.

`python -m tools.bench.calibration`. Each round starts a new fleet with empty caches, measures a
replica before and after the requests like `--calibrate`, sends the workload's requests at their
times (a next turn after the previous answer), and simulates the same workload with the mean of both
measurements. Token ids are drawn per block, so that prompts share exactly the same prefixes as in
the simulation. Each replica computes in one thread: simulated steps take longer while more replicas
compute than there are cores. A round is valid only on a quiet machine: if the two measurements
differ or other programs used the cores, it is repeated, and marked if that did not help. The last
lines report for each rate whether the steady rounds are within the bounds.
"""

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count

import httpx
import trio

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.parse import parse
from omni_proxy.shared.asgi.hypercorn_connection import first_leaf_error
from omni_proxy.simulate.calibrate import CalibrationError, measure
from omni_proxy.simulate.engine import Engine, EngineSpec
from omni_proxy.simulate.report import Run, percentile, summarize
from omni_proxy.simulate.simulation import Scenario, Simulation, simulated_worker
from omni_proxy.simulate.workload import Conversations, Request, Turns, Workload
from tools.bench.harness.processes import cpu_secs, end_on_signals, running

MODEL = "smollm2-135m"
SLOTS = 4  # requests that a replica computes concurrently
READY_SECS = 120
ANSWER_SECS = 120
BLOCK_TOKENS = 16
FIRST_ID, LAST_ID = 1000, 40_000  # ordinary words of the vocabulary
SYSTEM_PROMPTS, SYSTEM_TOKENS = 6, 256
TURNS = (1, 7)
THINK_SECS = 6.0


# The bounds: deviation from the simulated p50 of the first token, and points from its hit rate.
TTFT_SHARE, HIT_POINTS = 0.2, 5.0
STEADY_SHARE = 1.25  # the most that a prompt's time before and after may differ, as a ratio
OTHERS_CORES = 0.25  # cores that other programs may use


class FleetError(Exception):
    """The fleet did not start, or a request failed; the message has the reason."""


# The workload


def chats(requests: int, rate: float, chance: random.Random) -> Workload:
    """Conversations of one to seven short turns after one of six common prefixes.

    `rate` is in requests per second.
    """
    names = count(1)
    size = SYSTEM_TOKENS // BLOCK_TOKENS
    systems = [tuple(next(names) for _ in range(size)) for _ in range(SYSTEM_PROMPTS)]
    weights = [1 / place for place in range(1, SYSTEM_PROMPTS + 1)]
    openings: list[Request] = []
    rest: list[Turns] = []
    at, made = 0.0, 0
    while made < requests:
        turns = min(chance.randint(*TURNS), requests - made)
        made += turns
        session = f"session-{len(openings)}"
        tokens = SYSTEM_TOKENS + _length(chance, 40)
        system = chance.choices(systems, weights)[0]
        new = tuple(next(names) for _ in range(-(-tokens // BLOCK_TOKENS) - size))
        openings.append(
            Request(at, tokens, _length(chance, 8), system + new, BLOCK_TOKENS, session)
        )
        later = [
            (chance.expovariate(1 / THINK_SECS), _length(chance, 24), _length(chance, 8))
            for _ in range(turns - 1)
        ]
        rest.append(Turns(session, later))
        at += chance.expovariate(rate * 2 / sum(TURNS))
    return Conversations(openings, rest, names)


def _length(chance: random.Random, mean: float) -> int:
    return max(2, round(mean * chance.lognormvariate(-0.08, 0.4)))


@cache
def block_tokens(name: int) -> list[int]:
    chance = random.Random(f"block {name}")
    return [chance.randint(FIRST_ID, LAST_ID) for _ in range(BLOCK_TOKENS)]


def prompt_of(request: Request) -> list[int]:
    tokens = [token for name in request.blocks for token in block_tokens(name)]
    return tokens[: request.input_tokens]


# The real fleet


@dataclass(slots=True)
class Seen:
    """The clients' measurements of the real fleet, and the CPU seconds of its processes."""

    first_secs: list[float] = field(default_factory=list)
    total_secs: list[float] = field(default_factory=list)
    found_blocks: int = 0
    blocks: int = 0
    duration_secs: float = 0.0
    cpu_secs: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.found_blocks / max(1, self.blocks)


class Clients:
    """Sends a workload, each request in a task."""

    def __init__(self, base: str, workload: Workload) -> None:
        self.seen = Seen()
        self._workload = workload
        self._client = httpx.AsyncClient(
            base_url=base, timeout=ANSWER_SECS, limits=httpx.Limits(max_connections=None)
        )

    async def run(self) -> Seen:
        """Send all requests. Raises FleetError for the first one that failed."""
        try:
            async with self._client, trio.open_nursery() as nursery:
                self._began_at = trio.current_time()
                for request in self._workload.requests:
                    nursery.start_soon(self._send, request, nursery)
        except BaseExceptionGroup as group:
            raise FleetError(repr(first_leaf_error(group))) from group
        self.seen.duration_secs = trio.current_time() - self._began_at
        return self.seen

    async def _send(self, request: Request, nursery: trio.Nursery) -> None:
        await trio.sleep_until(self._began_at + request.at)
        body = {
            "model": MODEL,
            "prompt": prompt_of(request),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_at, first_at, cached = trio.current_time(), 0.0, 0
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise FleetError(f"status {response.status_code}: {response.text[:200]}")
            async for line in response.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if event.get("choices") and not first_at:
                    first_at = trio.current_time()
                if usage := event.get("usage"):
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
        now = trio.current_time()
        self.seen.first_secs.append(first_at - began_at)
        self.seen.total_secs.append(now - began_at)
        self.seen.found_blocks += cached // BLOCK_TOKENS
        self.seen.blocks += request.block_count
        for following in self._workload.next_after(request, now - self._began_at):
            nursery.start_soon(self._send, following, nursery)


@dataclass(frozen=True, slots=True)
class Fleet:
    url: str
    workers: Sequence[str]
    pid: int


@contextlib.contextmanager
def fleet(replicas: int, policy: str) -> Iterator[Fleet]:
    """`omni-proxy launch` with llama.cpp replicas; yields when all are ready."""
    with tempfile.TemporaryFile("w+") as log, free_port() as port:
        argv = [
            *(sys.executable, "-m", "omni_proxy", "launch", "--engine", "llamacpp"),
            *("--model-path", MODEL, "--dp-size", str(replicas), "--port", str(port)),
            *("--policy", policy, "--threads", "1", "--parallel", str(SLOTS), "--no-embeddings"),
        ]
        with running(argv, log) as process:
            url = f"http://127.0.0.1:{port}"
            workers = trio.run(_ready_workers, url, replicas)
            if len(workers) < replicas:
                log.seek(0)
                raise FleetError(f"the fleet did not start: {log.read()[-2000:]}")
            yield Fleet(url, workers, process.pid)


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield port


async def _ready_workers(url: str, replicas: int) -> list[str]:
    with trio.move_on_after(READY_SECS):
        async with httpx.AsyncClient(base_url=url, timeout=5) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    workers = (await client.get("/workers")).json()["workers"]
                    ready = [each["url"] for each in workers if each["is_healthy"]]
                    if len(ready) == replicas:
                        return ready
                await trio.sleep(0.2)
    return []


# The simulation


class SharedEngine(Engine):
    """An engine that shares cores with others: steps take longer while more of them compute."""

    peers: Sequence[Engine] = ()
    cores = 0

    @property
    def factor(self) -> float:
        busy = sum(each.in_flight > 0 for each in self.peers)
        return max(1.0, busy / self.cores) if self.cores else 1.0

    @factor.setter
    def factor(self, value: float) -> None:
        """Ignored: only the shared cores slow down an engine here."""


class SharedCores(Simulation):
    """A simulation whose engines compute in one thread each, on `cores` cores."""

    cores = 0

    def _add_engine(self, worker: WorkerSpec) -> None:
        engine = SharedEngine(self._spec, self.time.schedule, started_at=self.time.now)
        self.engines[worker.url] = engine
        engine.cores = self.cores
        engine.peers = self.engines.values()  # type: ignore[assignment]


def simulated(spec: EngineSpec, workload: Workload, replicas: int, policy: str, cores: int) -> Run:
    config = parse(f'[routing]\npolicy = "{policy}"\n', "calibration")
    workers = [simulated_worker(place) for place in range(replicas)]
    kind = type("OnCores", (SharedCores,), {"cores": cores})
    simulation = kind(config, Scenario(workers, workload, spec))
    simulation.run()
    return summarize(policy, {}, simulation, None)


# The comparison


def mean_spec(first: EngineSpec, second: EngineSpec) -> EngineSpec:
    return replace(
        first,
        prefill_tokens_per_sec=2
        / (1 / first.prefill_tokens_per_sec + 1 / second.prefill_tokens_per_sec),
        prefill_overhead_ms=(first.prefill_overhead_ms + second.prefill_overhead_ms) / 2,
        decode_step_ms=(first.decode_step_ms + second.decode_step_ms) / 2,
        decode_step_ms_per_request=(
            first.decode_step_ms_per_request + second.decode_step_ms_per_request
        )
        / 2,
    )


def _spec_text(spec: EngineSpec) -> str:
    prefill = f"{spec.prefill_overhead_ms:.0f} ms and {spec.prefill_tokens_per_sec:.0f} tokens/s"
    return (
        f"prefill {prefill}, "
        f"decode {spec.decode_step_ms:.1f} + {spec.decode_step_ms_per_request:.1f} ms per request"
    )


def _row(name: str, run: Run) -> tuple[str, float, float, float, float]:
    return name, run.hit_rate, run.ttft_ms["p50"], run.ttft_ms["p90"], run.total_ms["p50"]


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of one round.

    `ratio` is the real fleet's first-token p50 by the simulated one, `points` the real hit rate
    minus the simulated one. `trouble` is why the round is not valid, or "".
    """

    ratio: float
    points: float
    trouble: str

    @property
    def is_within(self) -> bool:
        return abs(self.ratio - 1) <= TTFT_SHARE and abs(self.points) <= HIT_POINTS


def _busy_secs() -> float:
    """User and system time of all programs of this machine; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat") as file:
        fields = file.readline().split()[1:]
        # User, nice, system, irq, softirq.
        ticks = sum(int(fields[place]) for place in (0, 1, 2, 5, 6))
        return ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def discrepancy_reason(before: EngineSpec, after: EngineSpec, others: float) -> str:
    """Why the measured engine may differ from the replicas during the round, or "".

    `others` is the number of cores that other programs used.
    """
    times = sorted(map(_prompt_secs, (before, after)))
    if times[1] > STEADY_SHARE * times[0]:
        return f"a prompt of {SYSTEM_TOKENS} tokens took {times[0]:.2f} s and {times[1]:.2f} s"
    if others > OTHERS_CORES:
        return f"other programs used {others:.2f} cores"
    return ""


def _prompt_secs(spec: EngineSpec) -> float:
    return spec.prefill_overhead_ms / 1000 + SYSTEM_TOKENS / spec.prefill_tokens_per_sec


def steady_round(arguments: argparse.Namespace, rate: float, seed: int) -> Compared:
    """Run a round, and repeat it if the machine was not quiet."""
    for _ in range(arguments.repeats):
        compared = one_round(arguments, rate, seed)
        if not compared.trouble:
            return compared
        print(f"  not steady: {compared.trouble}; the round is repeated", flush=True)
    return one_round(arguments, rate, seed)


def one_round(arguments: argparse.Namespace, rate: float, seed: int) -> Compared:
    def workload() -> Workload:
        return chats(arguments.requests, rate, random.Random(f"{seed} workload"))

    with fleet(arguments.replicas, arguments.policy) as real:
        before = measure(real.workers[0])
        used, own, busy = cpu_secs(real.pid), time.process_time(), _busy_secs()
        seen = trio.run(Clients(real.url, workload()).run)
        seen.cpu_secs = cpu_secs(real.pid) - used
        own = time.process_time() - own
        others = (_busy_secs() - busy - seen.cpu_secs - own) / seen.duration_secs
        after = measure(real.workers[0])
    spec = mean_spec(before, after)
    cores = arguments.cores
    found = simulated(spec, workload(), arguments.replicas, arguments.policy, cores)
    free = simulated(spec, workload(), arguments.replicas, arguments.policy, 0)
    blocks = simulated(
        replace(spec, slots=0), workload(), arguments.replicas, arguments.policy, cores
    )
    first, total = sorted(seen.first_secs), sorted(seen.total_secs)
    print(f"seed {seed}, {rate:g} requests/s: {_spec_text(before)}; then {_spec_text(after)}")
    print(
        f"  {len(first)} requests in {seen.duration_secs:.0f} s, the fleet used "
        f"{seen.cpu_secs / seen.duration_secs:.2f} cores, other programs {max(0.0, others):.2f}"
    )
    print(f"  {'':24}{'hit %':>8}{'p50':>8}{'p90':>8}{'total p50':>11}   (ms)")
    real_ms = [percentile(first, 50), percentile(first, 90), percentile(total, 50)]
    rows: list[tuple[str, float, float, float, float]] = [
        ("real", seen.hit_rate, real_ms[0] * 1000, real_ms[1] * 1000, real_ms[2] * 1000),
        _row(f"simulated, {cores} cores", found),
        _row("simulated, a core each", free),
        _row("simulated, blocks", blocks),
    ]
    for name, hit, p50, p90, whole in rows:
        print(f"  {name:24}{hit * 100:8.1f}{p50:8.0f}{p90:8.0f}{whole:11.0f}", flush=True)
    points = (seen.hit_rate - found.hit_rate) * 100
    return Compared(rows[0][2] / rows[1][2], points, discrepancy_reason(before, after, others))


def summary_of(rate: float, rounds: Sequence[Compared]) -> str:
    ratios = [each.ratio for each in rounds]
    points = [each.points for each in rounds]
    within = sum(each.is_within for each in rounds)
    unsteady = sum(bool(each.trouble) for each in rounds)
    noted = f", {unsteady} of them not steady," if unsteady else ""
    steady = [each for each in rounds if not each.trouble]
    verdict = "WITHIN" if all(each.is_within for each in steady) else "NOT WITHIN"
    if not steady:
        verdict = "NOT SHOWN: no round was steady, repeat it on a quiet machine"
    return (
        f"{rate:g} requests/s: first-token p50, real by simulated: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}); hit rate, real less simulated: "
        f"{statistics.median(points):+.1f} points ({min(points):+.1f} to {max(points):+.1f}); "
        f"{within} of {len(rounds)} rounds{noted} within {TTFT_SHARE:.0%} and "
        f"{HIT_POINTS:g} points: {verdict}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.calibration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, metavar="N", help="rounds, each with another seed (3)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the first round's workload (0)")
    add("--requests", type=int, default=200, metavar="N", help="requests per round (200)")
    add("--rate", type=float, action="append", metavar="R", dest="rates",
        help="approximate requests per second; may be repeated (1.2)")  # fmt: skip
    add("--repeats", type=int, default=1, metavar="N",
        help="repeats of a round in which the machine was not quiet (1)")  # fmt: skip
    add(
        "--replicas",
        type=int,
        default=4,
        metavar="N",
        help="llama.cpp replicas, one thread each (4)",
    )
    add("--policy", default="cache_aware", help="(cache_aware)")
    add("--cores", type=int, default=os.cpu_count(), metavar="N", help="cores of this machine")
    arguments = parser.parse_args()
    end_on_signals()
    seeds = range(arguments.seed, arguments.seed + arguments.rounds)
    try:
        summaries = [
            summary_of(rate, [steady_round(arguments, rate, seed) for seed in seeds])
            for rate in arguments.rates or [1.2]
        ]
    except (FleetError, CalibrationError) as error:
        print(f"tools.bench.calibration: {error}", file=sys.stderr)
        return 1
    print("\n".join(summaries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
