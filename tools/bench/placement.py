"""Compares policies on real work: hit rate, time to first token, and the share of a slow worker.

`python -m tools.bench.placement`: real replicas behind the proxy, one run per policy with the same
requests. shared: requests with several long common prefixes, mixed. uniform: no common prefixes.
slow: simulated workers, one of them ten times slower; measures only the shares. With --rounds the
policies run in turn, and the first token's p50 is reported as a ratio to that of least_request in
the same round.
"""

import argparse
import contextlib
import json
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import trio

from tools.bench.harness import report
from tools.bench.harness.processes import running
from tools.bench.harness.simulated_worker import stand_in

CONFIG = """\
[server]
port = {port}
state_file = "off"
log_level = "warning"
[routing]
policy = "{policy}"
[routing.cache_aware]
fallback = "{fallback}"
[health]
interval_secs = 2
success_threshold = 1
on_threshold = "unhealthy"
"""
LAUNCH = """\
[[launch]]
command = [{words}]
replicas = {replicas}
base_port = {base}
model = "{model}"
"""
READY_SECS = 60
SHARED, UNIFORM, SLOW = KINDS = ("shared", "uniform", "slow")
PROXY_PORT, WORKER_PORT = 44000, 34000  # the first ports to try; the ranges don't overlap
SLOW_SECS = (0.2, 0.02, 0.02)
BESIDE = "least_request"
POLICIES = (
    ("round_robin", "smallest_tree"), (BESIDE, "smallest_tree"),
    ("cache_aware", "smallest_tree"), ("cache_aware", "least_loaded"),
)  # fmt: skip
WORDS = (
    "river", "mountain", "copper", "lantern", "orchard", "velvet", "harbour", "saddle", "meadow",
    "thunder", "pepper", "violin", "glacier", "marble", "cedar", "compass", "ribbon", "tunnel",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """One answered request: times in seconds, tokens as counted by the replica."""

    first_secs: float
    prompt_tokens: int
    cached_tokens: int
    worker: str


def shared_prompts(chance: random.Random, families: int, each: int) -> list[str]:
    """Prompts with long common prefixes and a short unique tail, shuffled."""
    heads = [" ".join(chance.choices(WORDS, k=220)) for _ in range(families)]
    prompts = [
        f"{head}\nQuestion {n}: {chance.choice(WORDS)}?" for head in heads for n in range(each)
    ]
    chance.shuffle(prompts)
    return prompts


def uniform_prompts(chance: random.Random, count: int) -> list[str]:
    return [" ".join(chance.choices(WORDS, k=60)) for _ in range(count)]


async def drive(base: str, model: str, prompts: Sequence[str], clients: int) -> list[Seen]:
    """A closed loop: each client takes the next prompt when it has its answer."""
    left, seen = list(reversed(prompts)), []
    async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:

        async def work() -> None:
            while left:
                seen.append(await _one(client, model, left.pop()))

        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(work)
    return seen


async def _one(client: httpx.AsyncClient, model: str, prompt: str) -> Seen:
    body = {
        "model": model, "stream": True, "max_tokens": 4, "temperature": 0,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": prompt}],
    }  # fmt: skip
    began, first = trio.current_time(), 0.0
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if not first and any(_text(choice) for choice in event["choices"]):
                    first = trio.current_time() - began
        worker = answer.headers["x-sglang-omni-worker"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Seen(first, usage["prompt_tokens"], cached, worker)


def _text(choice: dict[str, dict[str, str]]) -> str:
    return choice["delta"].get("content") or ""


def _port_block(count: int, first: int) -> int:
    for base in range(first, first + 4000, count + 1):
        with contextlib.ExitStack() as held:
            try:
                for port in range(base, base + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise RuntimeError("no free ports in a row")


@contextlib.contextmanager
def proxy(policy: str, fallback: str, extra: str) -> Iterator[str]:
    """Start a proxy; yields its base URL. `extra` is the configuration of its workers."""
    port = _port_block(1, PROXY_PORT)
    with tempfile.TemporaryDirectory(prefix="omni-proxy-bench-") as folder:
        file = Path(folder) / "proxy.toml"
        file.write_text(CONFIG.format(port=port, policy=policy, fallback=fallback) + extra)
        with (
            (Path(folder) / "log").open("w") as log,
            running([sys.executable, "-m", "omni_proxy", "--config", str(file)], log),
        ):
            yield f"http://127.0.0.1:{port}"


async def ready(base: str, workers: int) -> None:
    with trio.fail_after(READY_SECS):
        async with httpx.AsyncClient(base_url=base, trust_env=False) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    reported = (await client.get("/health")).json()
                    if reported["routable_workers"] >= workers:
                        return
                await trio.sleep(0.2)


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    """Run each policy on new replicas with empty caches and the same prompts in the same order."""
    for kind in arguments.kinds:
        middles: dict[str, list[float]] = {}
        for number in range(arguments.rounds):
            order = POLICIES if number % 2 == 0 else POLICIES[::-1]
            for policy, fallback in order:
                name = policy if policy != "cache_aware" else f"{policy} ({fallback})"
                seen = _run(arguments, policy, fallback, _prompts(arguments, kind, number))
                middles.setdefault(name, []).append(median(each.first_secs for each in seen))
                yield f"{kind:16} {name:30} {_figures(seen)}"
        if arguments.rounds > 1:
            yield from _compared(kind, middles)


def _compared(kind: str, middles: dict[str, list[float]]) -> Iterator[str]:
    """Median and range of each policy's ratios to `BESIDE` within a round."""
    beside = middles[BESIDE]
    for name, own in middles.items():
        ratios = [one / other for one, other in zip(own, beside, strict=True)]
        best = min(own) / min(beside)
        reported = report.spread(ratios, 2)
        yield f"{kind:16} {name:30} first token p50 by {BESIDE} {reported}, best by best {best:.2f}"


def _prompts(arguments: argparse.Namespace, kind: str, number: int) -> list[str]:
    chance = random.Random(7 + number)
    if kind == SHARED:
        return shared_prompts(chance, arguments.families, arguments.each)
    return uniform_prompts(chance, arguments.families * arguments.each)


def _run(
    arguments: argparse.Namespace, policy: str, fallback: str, prompts: Sequence[str]
) -> list[Seen]:
    words = ["omni-proxy", "replica", "--engine", arguments.engine, "--model", arguments.model]
    words += ["--host", "{host}", "--port", "{port}"]
    count = arguments.replicas
    launch = LAUNCH.format(
        words=", ".join(json.dumps(word) for word in words),
        replicas=count, base=_port_block(count, WORKER_PORT), model=arguments.model,
    )  # fmt: skip
    with proxy(policy, fallback, launch) as base:
        trio.run(ready, base, count)
        return trio.run(drive, base, arguments.model, prompts, arguments.clients)


def _figures(seen: Sequence[Seen]) -> str:
    hit = sum(each.cached_tokens for each in seen) / sum(each.prompt_tokens for each in seen)
    firsts = sorted(each.first_secs for each in seen)
    shares = sorted(Counter(each.worker for each in seen).values(), reverse=True)
    return (
        f"hit rate {hit:5.1%}  first token p50 {median(firsts) * 1000:5.0f} ms  "
        f"p95 {firsts[int(0.95 * (len(firsts) - 1))] * 1000:5.0f} ms  shares {shares}"
    )


async def slow_share(policy: str, requests: int) -> float:
    """The share of the slow worker of three, with twelve clients in a closed loop."""
    async with trio.open_nursery() as nursery:
        urls = [await nursery.start(stand_in, secs) for secs in SLOW_SECS]
        extra = "".join(f'[[workers]]\nurl = "{url}"\n' for url in urls)
        with proxy(policy, "least_loaded", extra) as base:
            await ready(base, len(urls))
            counts = await _counted(base, requests)
        nursery.cancel_scope.cancel()
    slow = next(key for key in counts if key.endswith(urls[0].rpartition(":")[2]))
    return counts[slow] / counts.total()


async def _counted(base: str, requests: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    left = uniform_prompts(random.Random(3), requests)
    async with httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:

        async def work() -> None:
            while left:
                body = {"messages": [{"role": "user", "content": left.pop()}]}
                answer = await client.post("/v1/chat/completions", json=body)
                counts[answer.headers["x-sglang-omni-worker"]] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(work)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.placement", description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--families", type=int, default=12, help="shared prefixes (12)")
    parser.add_argument("--each", type=int, default=6, help="requests per shared prefix (6)")
    parser.add_argument("--rounds", type=int, choices=range(1, 31), metavar="1..30", default=1)
    parser.add_argument("--engine", choices=["torch", "llamacpp"], default="llamacpp")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--only", choices=KINDS, action="append", dest="kinds", help="may be repeated; default all"
    )
    arguments = parser.parse_args()
    kinds = arguments.kinds or KINDS
    arguments.kinds = [kind for kind in kinds if kind != SLOW]
    for row in rows(arguments):
        print(row, flush=True)
    if SLOW not in kinds:
        return 0
    for policy in ("round_robin", "least_request", "cache_aware"):
        share = trio.run(slow_share, policy, 600)
        print(f"{SLOW:16} {policy:30} share {share:.1%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
