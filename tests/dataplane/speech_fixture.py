"""Speech over real loopback sockets: a client, the data plane, a scripted worker."""

from __future__ import annotations

import json
from collections import deque
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import trio
import trio.testing
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Message,
    RejectConnection,
    Request,
    TextMessage,
)

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.fleet.registry import Fleet

NOW = datetime(2026, 11, 21, tzinfo=UTC)
PATH = "/v1/audio/speech/stream"
CONFIG = '{"type":"session.config","session":{"model":"m"}}'
DONE = '{"type":"session.done","session_id":"s","total_sentences":1}'


class Left(Exception):
    """The other end closed where a message was due."""


class Socket:
    """One end of a websocket: whole messages, and the other events as they come."""

    def __init__(self, stream, ws):
        self.stream, self.ws = stream, ws
        self.waiting = deque()
        self.parts = []

    async def send(self, event):
        await self.stream.send_all(self.ws.send(event))

    async def say(self, text):
        await self.send(TextMessage(data=text))

    async def event(self):
        """The next event; None at the end of the connection."""
        while True:
            while self.waiting:
                event = self._joined(self.waiting.popleft())
                if event is not None:
                    return event
            piece = await self.stream.receive_some()
            if not piece:
                return None
            self.ws.receive_data(piece)
            self.waiting.extend(self.ws.events())

    def _joined(self, event):
        if not isinstance(event, Message):
            return event
        self.parts.append(event.data)
        if not event.message_finished:
            return None
        whole = type(event)(data=type(event.data)().join(self.parts))
        self.parts.clear()
        return whole

    async def text(self):
        event = await self.event()
        if event is None or isinstance(event, CloseConnection):
            raise Left(event)
        assert isinstance(event, TextMessage), event
        return event.data

    async def error(self):
        event = json.loads(await self.text())
        assert event.pop("type") == "error"
        return event

    async def closed(self):
        event = await self.event()
        assert isinstance(event, CloseConnection), event
        return int(event.code), event.reason

    async def close(self, code=1000, reason=None):
        await self.send(CloseConnection(code=code, reason=reason))


class Worker:
    """A fake worker; `script(socket)` is one session, `refuse` a status for every handshake."""

    def __init__(self, script, refuse=0):
        self.script, self.refuse = script, refuse
        self.requests = []
        self.over = trio.Event()
        self.gone = trio.Event()
        self.listening = trio.CancelScope()

    async def start(self, nursery):
        self.listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = self.listeners[0].socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        nursery.start_soon(self._listen)

    async def _listen(self):
        with self.listening:
            await trio.serve_listeners(self._serve, self.listeners)
        self.gone.set()

    async def _serve(self, stream):
        ws = WSConnection(ConnectionType.SERVER)
        ws.receive_data(await stream.receive_some())
        request = next(ws.events())
        assert isinstance(request, Request)
        self.requests.append(request)
        socket = Socket(stream, ws)
        try:
            if self.refuse:
                await socket.send(RejectConnection(status_code=self.refuse, has_body=False))
                await stream.send_eof()
                return
            await socket.send(AcceptConnection())
            await self.script(socket)
        except (trio.BrokenResourceError, Left):
            pass
        finally:
            self.over.set()
            await stream.aclose()


class Setting:
    """A running data plane with its fleet."""

    def __init__(self, dataplane, fleet, workers):
        self.dataplane, self.fleet, self.workers = dataplane, fleet, workers
        host, port = dataplane.addresses()[0].rsplit(":", 1)
        self.address = host, int(port)

    async def dial(self):
        return await trio.open_tcp_stream(*self.address)

    @asynccontextmanager
    async def client(self, target=PATH, headers=()):
        stream = await self.dial()
        ws = WSConnection(ConnectionType.CLIENT)
        socket = Socket(stream, ws)
        async with stream:
            await socket.send(Request(host="router", target=target, extra_headers=list(headers)))
            assert isinstance(await socket.event(), AcceptConnection)
            yield socket

    def machine(self, index=0):
        return self.fleet.find(self.workers[index].url).health

    def counts(self, index=0):
        worker = self.fleet.find(self.workers[index].url)
        return tuple(of.get("tts_websocket", 0) for of in (worker.succeeded, worker.failed))

    async def settled(self):
        """Until the proxy has no connection left."""
        await self.dataplane.drained()
        return dict(self.dataplane.services.totals.ended)


def entry(url, model=None, capabilities=CAPABILITIES, **trust):
    return WorkerSpec(
        url=url, model=model, capabilities=frozenset(capabilities), disabled=False, weight=1,
        max_inflight=0, origin="file", **trust,
    )  # fmt: skip


@asynccontextmanager
async def running(*workers, config="", entries=None):
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for worker in workers:
                await worker.start(nursery)
            fleet = Fleet()
            reported = entries or [{}] * len(workers)
            fleet.apply(
                [entry(worker.url, **more) for worker, more in zip(workers, reported, strict=True)],
                NOW,
            )
            for worker in fleet.workers:
                for _ in range(2):
                    fleet.observe_probe(worker, status=200, error=None, at=NOW, epoch=0)
            made = parse("[server]\nport = 0\n" + config)
            dataplane = DataPlane(
                fleet, made, admin_socket="/nowhere", sources=Sources(lambda n: 0)
            )
            dataplane.prepare(made)()
            await nursery.start(dataplane.run)
            yield Setting(dataplane, fleet, workers)
            nursery.cancel_scope.cancel()


async def narrate(socket):
    """A good session: configured, one sentence as audio, done, closed."""
    assert json.loads(await socket.text())["type"] == "session.config"
    await socket.say('{"type":"session.configured"}')
    while json.loads(await socket.text())["type"] != "input.done":
        pass
    await socket.send(BytesMessage(data=bytes(range(256)) * 300))
    await socket.say('{"type":"audio.done","error":false}')
    await socket.say(DONE)
    await socket.close(1000, "bye")
    await socket.event()


async def listen(socket):
    """Takes everything, says nothing."""
    while not isinstance(await socket.event(), CloseConnection | None):
        pass


async def speak(client):
    await client.say(CONFIG)
    assert json.loads(await client.text()) == {"type": "session.configured"}
    await client.say('{"type":"input.text","text":"Hi."}')
    await client.say('{"type":"input.done"}')


async def heard_all(client):
    """What `narrate` says, to its end."""
    audio = await client.event()
    assert isinstance(audio, BytesMessage)
    assert audio.data == bytes(range(256)) * 300
    assert json.loads(await client.text())["type"] == "audio.done"
    assert await client.text() == DONE
    assert await client.closed() == (1000, "bye")
    await client.close()
