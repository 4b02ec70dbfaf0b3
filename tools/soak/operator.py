"""The operator of a soak: reloads, kills and restarts of workers, weight updates, pauses.

Invariant: only one of these at a time affects the honest workers, so most of them can always accept
requests, and a request never fails for lack of a worker.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from tools.soak.clients import Ledger
from tools.soak.fleet import Fleet
from tools.soak.wire import Reader, asked

STEP_SECS: Final = 4.0
DOWN_SECS: Final = 2.0  # from a kill to the restart
PAUSED_SECS: Final = 0.5
MEANT: Final = "?selector=model%3Dhonest"
CALL_SECS: Final = 60.0


async def call(
    port: int, method: str, target: str, body: dict[str, object] | None = None
) -> tuple[int, dict[str, object]]:
    """Send a control request; return the status and the JSON body of its answer."""
    raw = json.dumps(body).encode() if body is not None else b""
    with trio.fail_after(CALL_SECS):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(asked(method, target, f"127.0.0.1:{port}", raw))
            answer = await Reader(stream).message(answer=True)
    assert answer is not None, f"{method} {target}: no answer"
    return answer.status, json.loads(answer.body)


class Operator:
    """Runs the operations; `done` counts them, `failures` has those that failed."""

    def __init__(self, fleet: Fleet, ledger: Ledger) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []
        self._version = 0

    async def run(self, stop: trio.Event) -> None:
        steps: tuple[Callable[[], Awaitable[None]], ...] = (
            self._reload, self._kill, self._update, self._reload, self._pause, self._update,
        )  # fmt: skip
        turn = 0
        while not stop.is_set():
            await steps[turn % len(steps)]()
            turn += 1
            with trio.move_on_after(STEP_SECS):
                await stop.wait()
        await self._update()  # restarted workers get the weights of the others

    async def until_whole(self) -> None:
        """Wait until all honest workers accept requests."""
        with trio.fail_after(CALL_SECS):
            while True:
                if await self._routable() == len(self._fleet.honest):
                    return
                await trio.sleep(0.2)

    async def _routable(self) -> int:
        _, reported = await call(self._fleet.port, "GET", "/workers")
        records = reported["workers"]
        assert isinstance(records, list)
        return sum(each["routable"] for each in records if each["model"] == "honest")

    async def _reload(self) -> None:
        self._fleet.configure()
        self.done["reloads"] += 1

    async def _kill(self) -> None:
        ports = list(self._fleet.honest)
        port = ports[self.done["kills"] % len(ports)]
        self._ledger.kills.append(trio.current_time())
        self._fleet.kill_worker(port)
        self.done["kills"] += 1
        await trio.sleep(DOWN_SECS)
        self._fleet.start_worker(port)
        await trio.sleep(DOWN_SECS)

    async def _update(self) -> None:
        self._version += 1
        body: dict[str, object] = {"model_path": "m", "weight_version": f"v{self._version}"}
        self._ledger.updating += 1
        try:
            status, reported = await call(
                self._fleet.port, "POST", f"/update_weights_from_disk{MEANT}", body
            )
        finally:
            self._ledger.updating -= 1
        self.done["updates"] += 1
        if status != 200:
            self.failures.append(f"update {self._version}: {status} {json.dumps(reported)[:300]}")

    async def _pause(self) -> None:
        self._ledger.updating += 1
        try:
            for path in ("/pause_generation", "/continue_generation"):
                status, reported = await call(self._fleet.port, "POST", f"{path}{MEANT}", {})
                if status != 200:
                    self.failures.append(f"{path}: {status} {json.dumps(reported)[:300]}")
                await trio.sleep(PAUSED_SECS)
        finally:
            self._ledger.updating -= 1
        self.done["pauses"] += 1
