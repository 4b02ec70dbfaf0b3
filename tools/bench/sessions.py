"""The effect of sticky sessions on agents: session times while one of four replicas gets slow.

`python -m tools.bench.sessions`: every placement gets the same sessions, on loopback. An agent
sends a turn, waits for the answer, pauses (a tool runs), and sends the next turn with all earlier
ones; after the last turn it sends `POST /finish_session` and starts its next session. The replicas
are simulated (`simulated_engine`): the results show the routing, not an engine. All placements run
concurrently, each with its own proxy and replicas, which wait most of the time.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles

import httpx
import trio

from tools.bench.harness.peers import NotInstalled
from tools.bench.harness.processes import end_on_signals, running
from tools.bench.harness.proxies import free_port, omni_command
from tools.bench.harness.simulated_engine import SimulatedEngine

REPLICAS = 4
SLOW_AFTER_SECS = 3.0
FIRST_PROMPT = (600, 1200)  # tokens
TURNS = (4, 10)
ANSWER_TOKENS = (10, 30)
TOOL_TOKENS = (100, 300)  # that a tool adds to the prompt of the next turn
THINK_SECS = 0.5  # mean of an exponential distribution
START_SPREAD_SECS = 2.0  # within which the agents start
READY_SECS = 30.0
MAX_LATENESS = 1.25

CONFIG = """\
[server]
host = "127.0.0.1"
port = {port}
processes = {processes}
state_file = "off"
log_level = "warning"
[routing]
{routing}
[health]
interval_secs = 600
success_threshold = 1
{workers}"""

STICKY = 'policy = "least_request"\nsticky_sessions = true\n'
BY_SESSIONS = f'{STICKY}sticky_load = "sessions"\n'
GATE = "sticky_rebalance_abs = 6\nsticky_rebalance_rel = 3.0\n"
PLACEMENTS = {
    "least_request": 'policy = "least_request"',
    "consistent_hashing": 'policy = "consistent_hashing"',
    "sticky": STICKY,
    "sticky, gate": STICKY + GATE,
    "sessions": BY_SESSIONS,
    "sessions, gate": BY_SESSIONS + GATE,
}


@dataclass(frozen=True, slots=True)
class Turn:
    prompt_tokens: int
    answer_tokens: int
    think_secs: float


@dataclass(frozen=True, slots=True)
class Run:
    """The parameters of a run; `routing` is the configuration's table as text."""

    routing: str
    sessions: list[list[Turn]]
    agents: int
    slowdown: float
    pace: float
    processes: int


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one placement.

    `slow_share` is the slow replica's share of the turns that began after it had slowed down.
    `lateness` is the real by the simulated duration of a step.
    """

    session_secs: list[float]
    hit_rate: float
    slow_share: float
    moves: int
    lateness: float


class BenchError(Exception):
    """The proxy did not start, or an answer was not 200."""


def make_sessions(count: int, seed: int) -> list[list[Turn]]:
    chance = random.Random(seed)
    return [_session(chance) for _ in range(count)]


def _session(chance: random.Random) -> list[Turn]:
    prompt, turns = chance.randint(*FIRST_PROMPT), []
    for _ in range(chance.randint(*TURNS)):
        answer = chance.randint(*ANSWER_TOKENS)
        turns.append(Turn(prompt, answer, chance.expovariate(1 / THINK_SECS)))
        prompt += answer + chance.randint(*TOOL_TOKENS)
    return turns


class Agents:
    """The agents; each takes the next of the common sessions when it has finished its last one."""

    def __init__(self, port: int, run: Run) -> None:
        self._port = port
        self._count = run.agents
        self._pace = run.pace
        self._remaining = list(enumerate(run.sessions))[::-1]
        self.session_secs: list[float] = []

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(self._count):
                delay_secs = START_SPREAD_SECS * number / self._count
                nursery.start_soon(self._agent, delay_secs * self._pace)

    async def _agent(self, delay_secs: float) -> None:
        await trio.sleep(delay_secs)
        async with await trio.open_tcp_stream("127.0.0.1", self._port) as stream:
            while self._remaining:
                number, turns = self._remaining.pop()
                began_at = time.monotonic()
                for turn in turns:
                    await self._turn(stream, f"session-{number}", turn)
                    if turn is not turns[-1]:
                        await trio.sleep(turn.think_secs * self._pace)
                self.session_secs.append((time.monotonic() - began_at) / self._pace)
                await _post(stream, f"/finish_session?session_id=session-{number}")

    async def _turn(self, stream: trio.SocketStream, session: str, turn: Turn) -> None:
        body = {
            "model": "bench", "messages": [], "session": session,
            "prompt_tokens": turn.prompt_tokens, "max_tokens": turn.answer_tokens,
        }  # fmt: skip
        await _post(stream, "/v1/chat/completions", json.dumps(body), session)


async def _post(stream: trio.SocketStream, path: str, body: str = "{}", session: str = "") -> None:
    named = f"x-session-id: {session}\r\n" if session else ""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"{named}content-length: {len(body)}\r\n\r\n"
    )
    await stream.send_all((head + body).encode())
    status = await _status(stream)
    if status != 200:
        raise BenchError(f"POST {path} was answered with {status}")


async def _status(stream: trio.SocketStream) -> int:
    """Read the next answer to its end; return its status."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += await _receive(stream)
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
    while len(body) < length:
        body += await _receive(stream)
    return int(head.split(b" ", 2)[1])


async def _receive(stream: trio.SocketStream) -> bytes:
    piece = bytes(await stream.receive_some(65536))
    if not piece:
        raise BenchError("the proxy has closed a connection")
    return piece


def measure(run: Run) -> Result:
    """Run one placement. Raises BenchError."""
    try:
        return trio.run(_measure, run)
    except* BenchError as errors:
        found: BaseException = errors
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        error = found
    raise error


async def _measure(run: Run) -> Result:
    engines = [SimulatedEngine(run.pace) for _ in range(REPLICAS)]
    with tempfile.TemporaryDirectory() as folder:
        async with trio.open_nursery() as nursery:
            for engine in engines:
                await nursery.start(engine.serve)
            port = free_port()
            workers = "".join(f'[[workers]]\nurl = "{engine.url}"\n' for engine in engines)
            config = Path(folder) / "omni-proxy.toml"
            config.write_text(
                CONFIG.format(
                    port=port, processes=run.processes, routing=run.routing, workers=workers
                )
            )
            argv = shlex.split(omni_command().format(config=config))
            with running(argv, subprocess.DEVNULL):
                result = await _drive(port, run, engines)
            nursery.cancel_scope.cancel()
    return result


async def _drive(port: int, run: Run, engines: Sequence[SimulatedEngine]) -> Result:
    crowd, before = Agents(port, run), [0] * len(engines)

    async def slow_down() -> None:
        await trio.sleep(SLOW_AFTER_SECS * run.pace)
        before[:] = [engine.turns for engine in engines]
        engines[0].slowdown = run.slowdown

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        await _until_ready(client, run.processes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow_down)
            await crowd.run()
            nursery.cancel_scope.cancel()
        policy = (await client.get("/status")).json()["data_plane"]["policy"]
    after = [engine.turns - turns for engine, turns in zip(engines, before, strict=True)]
    cached = sum(engine.cached_tokens for engine in engines)
    prompts = sum(engine.prompt_tokens for engine in engines)
    sticky = policy.get("sticky", {})
    moves = sticky.get("moved", 0) + sticky.get("rebalanced", 0)
    return Result(
        crowd.session_secs, cached / prompts, after[0] / max(1, sum(after)), moves,
        max(engine.lateness for engine in engines),
    )  # fmt: skip


async def _until_ready(client: httpx.AsyncClient, processes: int) -> None:
    """Wait until all replicas are in rotation and all processes accept. Raises BenchError."""
    deadline = time.monotonic() + READY_SECS
    while time.monotonic() < deadline:
        try:
            fleet = (await client.get("/workers")).json()
            rows = (await client.get("/status")).json()["data_plane"]["processes"]
            serving = [row["state"] for row in rows].count("serving")
            # A single process is the main process, which has no row.
            if fleet["routable_workers"] == REPLICAS and serving == (
                processes if processes > 1 else 0
            ):
                return
        except httpx.TransportError:
            pass  # still starting
        await trio.sleep(0.1)
    raise BenchError("the proxy did not get ready in time")


def _row(name: str, results: Sequence[Result]) -> str:
    secs = [each for result in results for each in result.session_secs]
    return (
        f"{name:20} {mean(secs):8.2f} {quantiles(secs, n=10)[-1]:8.2f} {max(secs):8.2f} "
        f"{mean(result.hit_rate for result in results):10.0%} "
        f"{mean(result.slow_share for result in results):10.0%} "
        f"{mean(result.moves for result in results):8.0f}"
    )


HEAD = (
    f"{'placement':20} {'mean s':>8} {'p90 s':>8} {'max s':>8} {'cached':>10} {'slow gets':>10} "
    f"{'moves':>8}"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.sessions", description=__doc__)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument(
        "--sessions", type=int, default=128, help="sessions of all agents together (128)"
    )
    slowdown = "factor by which one replica gets slower (5)"
    parser.add_argument("--slowdown", type=float, default=5.0, help=slowdown)
    parser.add_argument("--rounds", type=int, choices=range(1, 31), metavar="1..30", default=1)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round (0)")
    pace = "real seconds per simulated second; use more on a busy machine (1)"
    parser.add_argument("--pace", type=float, default=1.0, help=pace)
    parser.add_argument("--processes", type=int, default=1, help="data-plane processes (1)")
    parser.add_argument(
        "--only", choices=PLACEMENTS, action="append", help="may be repeated; default all"
    )
    arguments = parser.parse_args()
    end_on_signals()
    names = arguments.only or list(PLACEMENTS)
    results: dict[str, list[Result]] = {name: [] for name in names}
    try:
        with ProcessPoolExecutor(len(names)) as pool:
            for number in range(arguments.rounds):
                sessions = make_sessions(arguments.sessions, arguments.seed + number)
                runs = [
                    Run(PLACEMENTS[name], sessions, arguments.agents, arguments.slowdown,
                        arguments.pace, arguments.processes)
                    for name in names
                ]  # fmt: skip
                for name, result in zip(names, pool.map(measure, runs), strict=True):
                    results[name].append(result)
    except (BenchError, NotInstalled) as error:
        print(f"tools.bench.sessions: {error}", file=sys.stderr)
        return 1
    print(HEAD)
    for name in names:
        print(_row(name, results[name]))
    latest = max(each.lateness for reported in results.values() for each in reported)
    if latest > MAX_LATENESS:
        print(
            f"the results are not valid: a simulated step took {latest:.2f} times its duration",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
