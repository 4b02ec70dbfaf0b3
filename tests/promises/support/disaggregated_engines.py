"""Fake prefill and decode engines that wait for each other as the real ones do.

SGLang: the prefill engine answers once a decode engine has joined its bootstrap room, and the
decode engine generates once it has the KV of the prompt. A waiting request stays in the queue until
it is aborted by `rid`, even if its connection is closed. vLLM with NIXL: the prefill engine answers
with a handle, which one decode engine may use once. vLLM with Mooncake: like SGLang, but with
transfer ids, and closing the connection frees a waiting request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from random import Random

import trio
import trio.testing

from tests.promises.support.clients import Client
from tests.promises.support.dataplane_fixture import RunningDataPlane, run_dataplane
from tests.promises.support.fakes import (
    LAST_CHUNK,
    PATIENCE_SECS,
    SSE_HEAD,
    Call,
    FakeWorker,
    chunk,
    counted,
)

TOKENS = 3
KV_ERROR = b'{"error": {"message": "KVTransferError: the session is not alive", "code": 500}}'

# Runs at the start of a request. Returns True if it has answered or broken the connection.
Fault = Callable[[Call], Awaitable[bool]]


def failing(status: str, body: bytes = b'{"error": "no"}') -> Fault:
    async def fault(call: Call) -> bool:
        await call.send(counted(body, status=status))
        return True

    return fault


async def resetting(call: Call) -> bool:
    call.reset()
    return True


async def silent(call: Call) -> bool:
    await call.until_left()
    return True


def once(fault: Fault) -> Fault:
    done = False

    async def first(call: Call) -> bool:
        nonlocal done
        if done:
            return False
        done = True
        return await fault(call)

    return first


class Aborted(Exception):
    """The request was aborted at its engine."""


async def eventually(holds: Callable[[], object]) -> None:
    """Runs other tasks until `holds()` is true; the deadline is for tests that hang."""
    with trio.fail_after(PATIENCE_SECS):
        while not holds():
            await trio.testing.wait_all_tasks_blocked(0.001)


class Rooms:
    """The rooms in which the legs of a request meet. Either leg may arrive first."""

    def __init__(self) -> None:
        self._sides: dict[tuple[object, str], trio.Event] = {}

    def side(self, room: object, name: str) -> trio.Event:
        return self._sides.setdefault((room, name), trio.Event())


class LegEngine(FakeWorker):
    """`held` has the ids of queued requests, `bodies` the decoded bodies of generation requests.
    `begun` is set when the first one arrives."""

    def __init__(self, rooms: Rooms) -> None:
        super().__init__(self._serve)
        self.rooms = rooms
        self.fault: Fault | None = None
        self.held: dict[str, trio.Event] = {}
        self.aborts: list[str] = []
        self.bodies: list[dict] = []
        self.heads: list[dict[str, str]] = []
        self.raw: list[bytes] = []
        self.begun = trio.Event()
        self.gate = trio.Event()  # tokens after the first wait for it
        self.gate.set()
        self.info: dict[str, object] = {}
        self.usage: dict[str, object] = {}

    async def _serve(self, call: Call) -> None:
        path = call.line.split()[1].partition("?")[0]
        if path == "/abort_request":
            await self._abort(call)
            return
        self.raw.append(call.body)
        body = json.loads(call.body)
        self.bodies.append(body)
        self.heads.append(dict(call.fields))
        self.begun.set()
        if self.fault is not None and await self.fault(call):
            return
        await self.generate(call, body)  # others may have arrived meanwhile

    async def generate(self, call: Call, body: dict) -> None:
        raise NotImplementedError

    async def _abort(self, call: Call) -> None:
        prefix = json.loads(call.body)["rid"]
        self.aborts.append(prefix)
        for rid, event in self.held.items():
            if rid.startswith(prefix):
                event.set()
        await call.send(counted(b"{}"))

    async def meet(self, rid: str, event: trio.Event) -> None:
        """Waits in the queue for the other leg. Raises Aborted."""
        aborted = self.held[rid] = trio.Event()
        try:
            async with trio.open_nursery() as nursery:

                async def until(which: trio.Event) -> None:
                    await which.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(until, event)
                nursery.start_soon(until, aborted)
        finally:
            del self.held[rid]
        if not event.is_set():
            raise Aborted


def as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


class SglangPrefill(LegEngine):
    role, connector = "prefill", "sglang"

    async def generate(self, call: Call, body: dict) -> None:
        rooms, rids = as_list(body["bootstrap_room"]), as_list(body["rid"])
        rids += rids[-1:] * (len(rooms) - len(rids))
        try:
            for room, rid in zip(rooms, rids, strict=True):
                self.rooms.side(room, "prefill").set()
                await self.meet(rid, self.rooms.side(room, "decode"))
                self.rooms.side(room, "kv").set()
        except Aborted:
            await call.send(counted(b'{"error": "aborted"}', status="500 Internal Server Error"))
            return
        items = [
            {"text": "", "index": n,
             "meta_info": {"id": rid, "input_token_logprobs": [[-0.5, n, None]]} | self.usage}
            for n, rid in enumerate(rids)
        ]  # fmt: skip
        await answer(call, body, [items])


class SglangDecode(LegEngine):
    role, connector = "decode", "sglang"

    async def generate(self, call: Call, body: dict) -> None:
        rooms, rids = as_list(body["bootstrap_room"]), as_list(body["rid"])
        rids += rids[-1:] * (len(rooms) - len(rids))
        try:
            for room, rid in zip(rooms, rids, strict=True):
                self.rooms.side(room, "decode").set()
                await self.meet(rid, self.rooms.side(room, "kv"))
        except Aborted:
            await call.send(counted(b'{"error": "aborted"}', status="500 Internal Server Error"))
            return
        steps = [
            [
                {"text": f"{token}", "index": n,
                 "meta_info": {"id": rid, "input_token_logprobs": [], "completion_tokens": token}
                 | self.usage}
                for n, rid in enumerate(rids)
            ]
            for token in range(TOKENS)
        ]  # fmt: skip
        await answer(call, body, steps, self.gate)


async def answer(
    call: Call, body: dict, steps: list[list[dict]], gate: trio.Event | None = None
) -> None:
    """Sends the response; each step has an item for each prompt."""
    if not body.get("stream"):
        last = steps[-1]
        batch = isinstance(body["bootstrap_room"], list)
        await call.send(counted(json.dumps(last if batch else last[0]).encode(),
                                "content-type: application/json"))  # fmt: skip
        return
    await call.send(SSE_HEAD)
    for number, items in enumerate(steps):
        if number and gate is not None:
            await gate.wait()
        await call.send(*(chunk(b"data: %b\n\n" % json.dumps(item).encode()) for item in items))
    await call.send(chunk(b"data: [DONE]\n\n"), LAST_CHUNK)


class NixlPrefill(LegEngine):
    """`leases` has the handles that no decode engine has used."""

    role, connector = "prefill", "nixl"

    def __init__(self, rooms: Rooms) -> None:
        super().__init__(rooms)
        self.leases: set[str] = set()
        self._numbers = count(1)
        self.gives_params = True

    async def generate(self, call: Call, body: dict) -> None:
        reply: dict[str, object] = {"id": "p", "choices": [], "usage": self.usage}
        if self.gives_params:
            lease = f"block-{next(self._numbers)}"
            self.leases.add(lease)
            reply["kv_transfer_params"] = {
                "do_remote_prefill": True, "do_remote_decode": False,
                "remote_block_ids": [[1, 2]], "remote_engine_id": self.url, "tp_size": 1,
                "remote_request_id": lease, "odd": "\u00e9 \u2028",
            }  # fmt: skip
        await call.send(counted(json.dumps(reply).encode(), "content-type: application/json"))


class NixlDecode(LegEngine):
    """`pulled` has the handles that it has used; `computed` counts prompts without a handle."""

    role, connector = "decode", "nixl"

    def __init__(self, rooms: Rooms) -> None:
        super().__init__(rooms)
        self.pulled: list[str] = []
        self.computed = 0
        self.prefills: list[NixlPrefill] = []

    async def generate(self, call: Call, body: dict) -> None:
        params = body.get("kv_transfer_params")
        if params is None:
            self.computed += 1
        else:
            lease = params["remote_request_id"]
            (owner,) = (p for p in self.prefills if p.url == params["remote_engine_id"])
            assert lease in owner.leases, "a reference was used twice"
            owner.leases.discard(lease)
            self.pulled.append(lease)
        await openai_answer(call, body, self.gate, self.usage)


async def openai_answer(
    call: Call, body: dict, gate: trio.Event, usage: dict[str, object] | None = None
) -> None:
    if not body.get("stream"):
        usage = usage or {"prompt_tokens": 1}
        reply = {"id": "d", "choices": [{"text": "012"}], "usage": usage}
        await call.send(counted(json.dumps(reply).encode(), "content-type: application/json"))
        return
    await call.send(SSE_HEAD)
    events = [{"text": f"{token}"} for token in range(TOKENS)]
    if usage:
        events.append({"choices": [], "usage": usage})
    for number, event in enumerate(events):
        if number:
            await gate.wait()
        await call.send(chunk(b"data: %b\n\n" % json.dumps(event).encode()))
    await call.send(chunk(b"data: [DONE]\n\n"), LAST_CHUNK)


class MooncakePrefill(LegEngine):
    """`bootstrap` serves `GET /query`. `engine_id` changes when the engine restarts; `engine_ids`
    has those of its data-parallel ranks, if it has any."""

    role, connector = "prefill", "mooncake"

    def __init__(self, rooms: Rooms) -> None:
        super().__init__(rooms)
        self.engine_id = "engine-1"
        self.engine_ids: list[str] = []
        self.queries = 0
        self.bootstrap = FakeWorker(self._query)

    async def _query(self, call: Call) -> None:
        self.queries += 1
        ids = {
            str(rank): {"engine_id": engine_id}
            for rank, engine_id in enumerate(self.engine_ids or [self.engine_id])
        }
        await call.send(counted(json.dumps(ids).encode()))

    async def generate(self, call: Call, body: dict) -> None:
        params = body["kv_transfer_params"]
        rank = int(dict(call.fields).get("x-data-parallel-rank", 0))
        room = params["transfer_id"], (self.engine_ids or [self.engine_id])[rank]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_left, call, nursery.cancel_scope)
            await self.meet(str(room), self.rooms.side(room, "decode"))
            nursery.cancel_scope.cancel()
        if self.rooms.side(room, "decode").is_set():
            self.rooms.side(room, "kv").set()
            reply = {"id": "p", "choices": [], "usage": self.usage}
            await call.send(counted(json.dumps(reply).encode()))


class MooncakeDecode(LegEngine):
    role, connector = "decode", "mooncake"

    async def generate(self, call: Call, body: dict) -> None:
        params = body.get("kv_transfer_params")
        if params is not None:
            room = params["transfer_id"], params["remote_engine_id"]
            self.rooms.side(room, "decode").set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_left, call, nursery.cancel_scope)
                await self.meet(str(room), self.rooms.side(room, "kv"))
                nursery.cancel_scope.cancel()
            if not self.rooms.side(room, "kv").is_set():
                return
        await openai_answer(call, body, self.gate, self.usage)


async def _cancel_when_left(call: Call, scope: trio.CancelScope) -> None:
    await call.until_left()
    scope.cancel()


ENGINES = {
    "sglang": (SglangPrefill, SglangDecode),
    "nixl": (NixlPrefill, NixlDecode),
    "mooncake": (MooncakePrefill, MooncakeDecode),
}


class Fleet:
    """Prefill and decode engines; `before` is the proxy in front of them."""

    def __init__(self, prefills: list, decodes: list, before: RunningDataPlane) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.before = before

    @property
    def engines(self) -> list[LegEngine]:
        return [*self.prefills, *self.decodes]

    @property
    def held(self) -> list[str]:
        """The ids of requests in the queues of all engines."""
        return [rid for engine in self.engines for rid in engine.held]

    def failures(self) -> dict[str, int]:
        """Returns the consecutive failures of workers that have any, by URL."""
        workers = self.before.fleet.workers
        counts = {worker.url: worker.health.consecutive_failures for worker in workers}
        return {url: count for url, count in counts.items() if count}


def worker_entry(engine: LegEngine, url: str = "") -> str:
    port = ""
    if isinstance(engine, MooncakePrefill):
        port = f"bootstrap_port = {engine.bootstrap.url.rpartition(':')[2]}\n"
    return (
        f'[[workers]]\nurl = "{url or engine.url}"\nrole = "{engine.role}"\n'
        f'kv_connector = "{engine.connector}"\n{port}'
    )


@asynccontextmanager
async def fleet_of(
    connector: str, prefills: int = 1, decodes: int = 1, *, config: str = "", more: str = ""
) -> AsyncIterator[tuple[Fleet, Client]]:
    """Runs engines and a proxy, and connects a client. `more` has further worker entries."""
    rooms = Rooms()
    prefill_class, decode_class = ENGINES[connector]
    first = [prefill_class(rooms) for _ in range(prefills)]
    second = [decode_class(rooms) for _ in range(decodes)]
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        for engine in (*first, *second):
            await nursery.start(engine.serve)
            if isinstance(engine, MooncakePrefill):
                await nursery.start(engine.bootstrap.serve)
            if isinstance(engine, NixlDecode):
                engine.prefills = first
        entries = "".join(worker_entry(engine) for engine in (*first, *second))
        before = await stack.enter_async_context(
            run_dataplane(config=f"{config}\n{entries}{more}", random_below=Random(1).randrange)
        )
        client = await stack.enter_async_context(before.client())
        yield Fleet(first, second, before), client
        await stack.aclose()
        nursery.cancel_scope.cancel()
