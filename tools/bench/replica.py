"""Measures a replica: start until healthy, first tokens, cold and cached prompts, parallel decode.

`python -m tools.bench.replica`, or `python -m tools.bench --replica`. Measures `omni-proxy replica`
with one thread from outside, over HTTP, and ends it. Parallel decode is compared within a round,
whose legs run within seconds of each other.
"""

import argparse
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import trio

from tools.bench.harness import report
from tools.bench.harness.processes import end_on_signals, rss_mib, running

SMOLLM2, TINY = "smollm2-135m", "tiny"
SHORT = "What is the capital of France?"
LONG_TOKENS = 1000
PROMPT_TOKENS = 16
NEW_TOKENS = 48
AT_ONCE = (1, 8, 16)
READY_SECS = 60
BUDGET_SECS = 115
# Ids of ordinary words; control tokens and bytes have lower ids.
FIRST_ID, LAST_ID = 1000, 40_000


class ReplicaBenchError(Exception):
    """The replica did not start or returned an error; the message has its output."""


class Replica:
    """A client of a running replica that measures times."""

    def __init__(self, client: httpx.AsyncClient, pid: int) -> None:
        self._client = client
        self.pid = pid

    async def healthy_secs(self, started: float) -> float:
        """Wait until GET /health is 200; return the seconds since `started`."""
        with trio.move_on_after(READY_SECS):
            while True:
                try:
                    if (await self._client.get("/health")).status_code == 200:
                        return trio.current_time() - started
                except httpx.TransportError:
                    pass  # not listening yet
                await trio.sleep(0.01)
        raise ReplicaBenchError(f"it was not healthy within {READY_SECS} s")

    async def times(self, path: str, body: dict[str, Any]) -> list[float]:
        """The arrival time of each event of a stream, and of its end."""
        came: list[float] = []
        async with self._client.stream("POST", path, json=body | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                if answer.status_code != 200 or '"error"' in line[:12]:
                    raise ReplicaBenchError(f"{path}: {answer.status_code} {line[:200]}")
                if line.startswith("data: {"):
                    came.append(trio.current_time())
        return came

    async def first_token_secs(self, path: str, body: dict[str, Any]) -> float:
        started = trio.current_time()
        return (await self.times(path, body))[0] - started

    async def decode_per_sec(self, count: int, chance: random.Random) -> float:
        """Tokens per second of `count` concurrent streams, from the first token of any of them."""
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        came: list[list[float]] = []

        async def run(prompt: list[int]) -> None:
            body = {"input_ids": prompt, "sampling_params": sampling}
            came.append(await self.times("/generate", body))

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(run, token_ids(PROMPT_TOKENS, chance))
        first, last = min(each[0] for each in came), max(each[-1] for each in came)
        return (count * NEW_TOKENS - 1) / (last - first)


def token_ids(count: int, chance: random.Random) -> list[int]:
    return [chance.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


@asynccontextmanager
async def replica(model: str) -> AsyncIterator[tuple[Replica, float]]:
    """Start a replica; yields it and the seconds until it was healthy."""
    with socket.create_server(("127.0.0.1", 0)) as trial:
        port = trial.getsockname()[1]
    argv = [sys.executable, "-m", "omni_proxy", "replica", "--port", str(port)]
    argv += ["--model", model, "--threads", "1", "--log-level", "error"]
    limits = httpx.Limits(max_connections=None)
    base_url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as output:
        started = trio.current_time()
        with running(argv, output) as process:
            async with httpx.AsyncClient(
                base_url=base_url, timeout=60, limits=limits, trust_env=False
            ) as client:
                it = Replica(client, process.pid)
                try:
                    yield it, await it.healthy_secs(started)
                except (ReplicaBenchError, httpx.HTTPError) as error:
                    output.seek(0)
                    raise ReplicaBenchError(f"{model}: {error}\n{output.read()[-2000:]}") from error


Row = tuple[str, str, str]


async def measured(rounds: int) -> list[Row]:
    """Rows of name, result, and expected result."""
    chance = random.Random(0)
    rows: list[Row] = []
    for model, wanted in ((TINY, "under 4 s"), (SMOLLM2, "under 8 s")):
        secs = []
        for _ in range(rounds):
            async with replica(model) as (_, ready_secs):
                secs.append(ready_secs)
        rows.append((f"{model}: start to healthy, s", report.spread(secs, 2), wanted))
    async with replica(SMOLLM2) as (it, _):
        rows.append(("RSS when healthy, MiB", f"{rss_mib(it.pid):.0f}", ""))
        rows += await _first_tokens(it, rounds, chance)
        rows += await _decode(it, rounds, chance)
        rows.append(("RSS after all of it, MiB", f"{rss_mib(it.pid):.0f}", ""))
    return rows


async def _first_tokens(it: Replica, rounds: int, chance: random.Random) -> list[Row]:
    message = {"role": "user", "content": SHORT}
    short = {"messages": [message], "max_tokens": 2, "temperature": 0}
    path = "/v1/chat/completions"
    very_first = await it.first_token_secs(path, short)
    warm = [await it.first_token_secs(path, short) for _ in range(2 * rounds)]
    cold, cached = [], []
    for _ in range(rounds):
        prompt = token_ids(LONG_TOKENS, chance)
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        cold.append(await it.first_token_secs("/generate", body))
        cached.append(await it.first_token_secs("/generate", body))
    sooner = [before / after for before, after in zip(cold, cached, strict=True)]
    long = f"{LONG_TOKENS} tokens: first token"
    return [
        ("short prompt: very first token, s", f"{very_first:.2f}", "under 0.4 s"),
        ("short prompt: first token again, s", report.spread(warm, 2), "under 0.4 s"),
        (f"{long}, cold, s", report.spread(cold, 2), ""),
        (f"{long}, cached, s", report.spread(cached, 3), ""),
        (f"{long}, cold by cached", report.spread(sooner, 1), "at least 5"),
    ]


async def _decode(it: Replica, rounds: int, chance: random.Random) -> list[Row]:
    rates: dict[int, list[float]] = {count: [] for count in AT_ONCE}
    for number in range(rounds):
        for count in AT_ONCE if number % 2 == 0 else AT_ONCE[::-1]:
            rates[count].append(await it.decode_per_sec(count, chance))
    rows = [
        (f"decode, {count} at once, tokens/s", report.spread(rates[count]), "") for count in AT_ONCE
    ]
    for count, wanted in ((8, "at least 2.5"), (16, "")):
        ratios = [many / one for many, one in zip(rates[count], rates[1], strict=True)]
        rows.append((f"decode, {count} at once by one", report.spread(ratios, 2), wanted))
    return rows


async def _bounded(rounds: int) -> list[Row]:
    with trio.move_on_after(BUDGET_SECS):
        return await measured(rounds)
    raise ReplicaBenchError(f"it took more than {BUDGET_SECS} s: give fewer --rounds")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.replica", description=__doc__)
    parser.add_argument("--rounds", type=int, choices=range(1, 6), metavar="1..5", default=2)
    arguments = parser.parse_args(argv)
    end_on_signals()
    facts = report.machine()
    try:
        rows = trio.run(_bounded, arguments.rounds)
    except ReplicaBenchError as error:
        print(f"tools.bench.replica: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    print()
    print("\n".join(report.columns([["", "median (lowest..highest)", "wanted"], *map(list, rows)])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
