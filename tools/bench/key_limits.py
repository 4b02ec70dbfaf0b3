"""`python -m tools.bench.key_limits`: limits of [[keys]] under many clients and several processes.

Sends real requests through the real program for a minute, to a simulated worker that counts them.
Prints the counts and the limits; the exit status is 1 if a limit does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from tools.program_address import program_address

REQUESTS, IN_FLIGHT, TOKENS = 600, 4, 30_000
LIMITS = {
    "rate": f"requests_per_minute = {REQUESTS}",
    "flight": f"max_inflight = {IN_FLIGHT}",
    "tokens": f"tokens_per_minute = {TOKENS}",
}
PAUSE_SECS = 0.25  # of a client after a refused request
TOLERANCE = 0.02
MAX_TOKENS = 50
LEFT = (trio.BrokenResourceError, trio.ClosedResourceError)


@dataclass(slots=True)
class CountingWorker:
    """Counts requests by caller, which it takes from the model: keys don't reach workers."""

    url: str = ""
    begun: Counter[str] = field(default_factory=Counter)
    tokens_in: Counter[str] = field(default_factory=Counter)
    tokens_out: Counter[str] = field(default_factory=Counter)
    in_flight: Counter[str] = field(default_factory=Counter)
    peaks: Counter[str] = field(default_factory=Counter)

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        await trio.serve_listeners(self._connection, [listener], task_status=task_status)  # type: ignore[arg-type]

    async def _connection(self, stream: trio.SocketStream) -> None:
        rest = b""
        try:
            while True:
                while b"\r\n\r\n" not in rest:
                    rest += await _some(stream)
                head, rest = rest.split(b"\r\n\r\n", 1)
                counted = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                length = int(counted[1]) if counted else 0
                while len(rest) < length:
                    rest += await _some(stream)
                body, rest = rest[:length], rest[length:]
                text = json.dumps(await self._reply(body)).encode()
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                await stream.send_all(head + b"content-length: %d\r\n\r\n%b" % (len(text), text))
        except LEFT:
            return

    async def _reply(self, body: bytes) -> dict[str, Any]:
        if not body:
            return {"data": []}
        caller = json.loads(body)["model"]
        self.begun[caller] += 1
        self.in_flight[caller] += 1
        self.peaks[caller] = max(self.peaks[caller], self.in_flight[caller])
        await trio.sleep(random.uniform(0.01, 0.05))
        self.in_flight[caller] -= 1
        used = {
            "prompt_tokens": random.randint(5, 15),
            "completion_tokens": random.randint(10, MAX_TOKENS),
        }
        self.tokens_in[caller] += used["prompt_tokens"]
        self.tokens_out[caller] += used["completion_tokens"]
        return {"choices": [], "usage": used}


async def _some(stream: trio.SocketStream) -> bytes:
    piece = await stream.receive_some(65536)
    if not piece:
        raise trio.BrokenResourceError
    return bytes(piece)


async def _ask(url: str, caller: str, until: float) -> None:
    body = {"model": caller, "messages": [], "max_tokens": MAX_TOKENS}
    async with httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer key-{caller}"},
        timeout=30,
        trust_env=False,
    ) as client:
        while trio.current_time() < until:
            answer = await client.post("/v1/chat/completions", json=body)
            if answer.status_code == 429:
                await trio.sleep(PAUSE_SECS * random.uniform(0.8, 1.2))
            else:
                answer.raise_for_status()


def configuration(url: str, processes: int) -> str:
    keys = "".join(
        f'[[keys]]\nname = "{name}"\nkey_sha256 = "{_sha256(f"key-{name}")}"\n{limit}\n'
        for name, limit in LIMITS.items()
    )
    return f'[server]\nport = 0\nprocesses = {processes}\n[[workers]]\nurl = "{url}"\n{keys}'


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def main(clients: int, processes: int, secs: float) -> bool:
    worker = CountingWorker()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "proxy.toml"
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.serve)
            file.write_text(configuration(worker.url, processes))
            command = [sys.executable, "-m", "omni_proxy", "--config", str(file)]
            process = await nursery.start(
                partial(trio.run_process, command, stderr=subprocess.PIPE, check=False)
            )
            url = await program_address(process)
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  only by asking
                    await trio.sleep(0.05)
                until = trio.current_time() + secs
                async with trio.open_nursery() as asking:
                    for number in range(clients):
                        asking.start_soon(_ask, url, list(LIMITS)[number % len(LIMITS)], until)
                await trio.sleep(1)  # processes report ended requests four times a second
                rows = {row["name"]: row for row in (await client.get("/keys")).json()["keys"]}
            process.send_signal(signal.SIGTERM)
            await process.wait()
            nursery.cancel_scope.cancel()
    return judge(worker, rows)


def judge(worker: CountingWorker, rows: dict[str, dict[str, Any]]) -> bool:
    used = worker.tokens_in["tokens"] + worker.tokens_out["tokens"]
    findings = [
        ("requests that began", worker.begun["rate"], f"of {REQUESTS}", REQUESTS),
        ("tokens", used, f"of {TOKENS}", TOKENS),
    ]
    good = True
    for name, value, words, limit in findings:
        share = value / limit - 1
        good &= abs(share) <= TOLERANCE
        print(f"{name}: {value} {words} ({share:+.2%})")
    peak = worker.peaks["flight"]
    good &= peak <= IN_FLIGHT
    print(f"most in flight: {peak} of {IN_FLIGHT}, {worker.begun['flight']} requests")
    for name, row in rows.items():
        own = worker.tokens_in[name], worker.tokens_out[name]
        counted = row["input_tokens"], row["output_tokens"]
        good &= own == counted
        print(f"{name}: tokens counted {counted}, the worker's {own}; refused {row['refused']}")
    return good


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.key_limits", description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--secs", type=float, default=59)
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    raise SystemExit(0 if trio.run(main, given.clients, given.processes, given.secs) else 1)
