"""The honest clients: each sends a request, reads and checks the complete answer, and pauses.

A request may fail only if its worker was killed while its stream was running: a stream can't be
moved to another worker once it has begun. Any other failure is the proxy's.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import trio

from tools.soak.wire import Broken, Message, Reader, asked

PAUSE_SECS: Final = 0.25  # between two requests of a client
TIMEOUT_SECS: Final = 30.0
KILL_SECS: Final = 3.0  # for how long after a kill it may be the cause of a broken stream
SHOWN_FAILURES: Final = 20


@dataclass(slots=True)
class Ledger:
    """The results of all honest requests, and when workers were killed or updated."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)  # seconds to the end, by phase
    kills: list[float] = field(default_factory=list)
    updating: int = 0  # operations that hold requests now
    phase: str = "no attack"

    def fail(self, why: str) -> None:
        self.counts["failed"] += 1
        if len(self.failures) < SHOWN_FAILURES:
            self.failures.append(why)

    def took(self, secs: float, *, held: bool) -> None:
        self.counts["answered"] += 1
        phase = f"{self.phase}, held by an update" if held else self.phase
        self.times.setdefault(phase, []).append(secs)

    def killed_since(self, began: float) -> bool:
        return any(at >= began - KILL_SECS for at in self.kills)


class Client:
    """Sends requests, over one connection after another; `number` decides whether it streams."""

    def __init__(self, number: int, port: int, ledger: Ledger) -> None:
        self._number = number
        self._port = port
        self._ledger = ledger
        self._sent = 0
        self._reader: Reader | None = None

    async def run(self, stop: trio.Event) -> None:
        await trio.sleep(self._number * PAUSE_SECS / 32)
        while not stop.is_set():
            await self._once()
            with trio.move_on_after(PAUSE_SECS):
                await stop.wait()
        await self._close()

    async def _once(self) -> None:
        ledger, began, held = self._ledger, trio.current_time(), self._ledger.updating > 0
        streamed = self._number % 2 == 1
        try:
            with trio.fail_after(TIMEOUT_SECS):
                why = await self._ask(streamed)
        except (Broken, OSError, trio.TooSlowError) as error:
            why = f"{type(error).__name__}: {error}"
            await self._close()
        now = trio.current_time()
        if not why:
            ledger.took(now - began, held=held or ledger.updating > 0)
        elif streamed and why.startswith("broken stream") and ledger.killed_since(began):
            ledger.counts["streams cut by a kill"] += 1
            await self._close()
        else:
            ledger.fail(f"{'stream' if streamed else 'request'} after {now - began:.2f} s: {why}")
            await self._close()

    async def _ask(self, streamed: bool) -> str:
        """Send a request; return why its answer is wrong, "" if it is right."""
        self._sent += 1
        nonce = f"{self._number}-{self._sent}"
        content = f"Client {self._number} says hello for the {self._sent}th time."
        body = {
            "model": "honest", "stream": streamed, "nonce": nonce,
            "messages": [{"role": "user", "content": content}],
        }  # fmt: skip
        reader = await self._connected()
        unique = {"traceparent": f"00-{self._number:016x}{self._sent:016x}-{self._sent:016x}-01"}
        request = asked(
            "POST", "/v1/chat/completions", f"127.0.0.1:{self._port}",
            json.dumps(body).encode(), unique,
        )  # fmt: skip
        try:
            await reader.stream.send_all(request)
            answer = await reader.message(answer=True)
        except (Broken, trio.BrokenResourceError) as error:
            return f"broken {'stream' if streamed else 'answer'}: {error}"
        if answer is None:
            return "the connection was closed without an answer"
        return _judged(answer, nonce, streamed)

    async def _connected(self) -> Reader:
        if self._reader is None:
            self._reader = Reader(await trio.open_tcp_stream("127.0.0.1", self._port))
        return self._reader

    async def _close(self) -> None:
        if self._reader is not None:
            await trio.aclose_forcefully(self._reader.stream)
            self._reader = None


def _judged(answer: Message, nonce: str, streamed: bool) -> str:
    if answer.status != 200:
        return f"status {answer.status}: {answer.body[:300].decode('utf-8', 'replace')}"
    if not streamed:
        same = json.loads(answer.body)["nonce"] == nonce
        return "" if same else "the answer to another request"
    events = answer.body.split(b"\n\n")
    if events[-2:] != [b"data: [DONE]", b""]:
        return f"broken stream: it ends with {answer.body[-200:]!r}"
    reported = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    return "" if {each["nonce"] for each in reported} == {nonce} else "events of another request"
