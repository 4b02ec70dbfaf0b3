"""Speech sessions over loopback sockets: a client, the data plane and scripted workers."""

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


class Disconnected(Exception):
    """The other end closed the connection instead of sending a message."""


class Socket:
    """One end of a websocket: receives complete messages and all other events."""

    def __init__(self, stream, ws):
        self.stream, self.ws = stream, ws
        self.waiting = deque()
        self.parts = []

    async def send(self, event):
        await self.stream.send_all(self.ws.send(event))

    async def send_text(self, text):
        await self.send(TextMessage(data=text))

    async def receive_event(self):
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

    async def receive_text(self):
        event = await self.receive_event()
        if event is None or isinstance(event, CloseConnection):
            raise Disconnected(event)
        assert isinstance(event, TextMessage), event
        return event.data

    async def receive_error(self):
        event = json.loads(await self.receive_text())
        assert event.pop("type") == "error"
        return event

    async def receive_close(self):
        event = await self.receive_event()
        assert isinstance(event, CloseConnection), event
        return int(event.code), event.reason

    async def close(self, code=1000, reason=None):
        await self.send(CloseConnection(code=code, reason=reason))


class Worker:
    """A fake worker: `script(socket)` serves a session, `refuse` is a status for all handshakes."""

    def __init__(self, script, refuse=0):
        self.script, self.refuse = script, refuse
        self.requests = []
        self.session_ended = trio.Event()
        self.stopped = trio.Event()
        self.listening = trio.CancelScope()

    async def start(self, nursery):
        self.listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = self.listeners[0].socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        nursery.start_soon(self._listen)

    async def _listen(self):
        with self.listening:
            await trio.serve_listeners(self._serve, self.listeners)
        self.stopped.set()

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
        except (trio.BrokenResourceError, Disconnected):
            pass
        finally:
            self.session_ended.set()
            await stream.aclose()


class RunningDataPlane:
    """A running data plane with its fleet."""

    def __init__(self, dataplane, fleet, workers):
        self.dataplane, self.fleet, self.workers = dataplane, fleet, workers
        host, port = dataplane.addresses()[0].rsplit(":", 1)
        self.address = host, int(port)

    async def open_stream(self):
        return await trio.open_tcp_stream(*self.address)

    @asynccontextmanager
    async def client(self, target=PATH, headers=()):
        stream = await self.open_stream()
        ws = WSConnection(ConnectionType.CLIENT)
        socket = Socket(stream, ws)
        async with stream:
            await socket.send(Request(host="router", target=target, extra_headers=list(headers)))
            assert isinstance(await socket.receive_event(), AcceptConnection)
            yield socket

    def health(self, index=0):
        return self.fleet.find(self.workers[index].url).health

    def counts(self, index=0):
        worker = self.fleet.find(self.workers[index].url)
        return tuple(counts.get("tts_websocket", 0) for counts in (worker.succeeded, worker.failed))

    async def wait_until_drained(self):
        """Wait until the proxy has no connections; returns the counts of outcomes."""
        await self.dataplane.drained()
        return self.dataplane.services.totals.ended_by_outcome()


def entry(url, model=None, capabilities=CAPABILITIES, **tls):
    return WorkerSpec(
        url=url, model=model, capabilities=frozenset(capabilities), disabled=False, weight=1,
        max_inflight=0, origin="file", **tls,
    )  # fmt: skip


@asynccontextmanager
async def run_proxy(*workers, config="", entries=None):
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for worker in workers:
                await worker.start(nursery)
            fleet = Fleet()
            settings = entries or [{}] * len(workers)
            fleet.apply(
                [
                    entry(worker.url, **fields)
                    for worker, fields in zip(workers, settings, strict=True)
                ],
                NOW,
            )
            for worker in fleet.workers:
                for _ in range(2):
                    fleet.observe_probe(worker, status=200, error=None, at=NOW, epoch=0)
            parsed = parse("[server]\nport = 0\n" + config)
            dataplane = DataPlane(
                fleet, parsed, admin_socket="/nowhere", sources=Sources(lambda n: 0)
            )
            dataplane.prepare(parsed)()
            await nursery.start(dataplane.run)
            yield RunningDataPlane(dataplane, fleet, workers)
            nursery.cancel_scope.cancel()


async def serve_speech(socket):
    """A successful session: configured, the audio of one sentence, done, closed."""
    assert json.loads(await socket.receive_text())["type"] == "session.config"
    await socket.send_text('{"type":"session.configured"}')
    while json.loads(await socket.receive_text())["type"] != "input.done":
        pass
    await socket.send(BytesMessage(data=bytes(range(256)) * 300))
    await socket.send_text('{"type":"audio.done","error":false}')
    await socket.send_text(DONE)
    await socket.close(1000, "bye")
    await socket.receive_event()


async def read_until_close(socket):
    """Reads all events and sends none."""
    while not isinstance(await socket.receive_event(), CloseConnection | None):
        pass


async def request_speech(client):
    await client.send_text(CONFIG)
    assert json.loads(await client.receive_text()) == {"type": "session.configured"}
    await client.send_text('{"type":"input.text","text":"Hi."}')
    await client.send_text('{"type":"input.done"}')


async def receive_speech(client):
    """Receive all that `serve_speech` sends, and close."""
    audio = await client.receive_event()
    assert isinstance(audio, BytesMessage)
    assert audio.data == bytes(range(256)) * 300
    assert json.loads(await client.receive_text())["type"] == "audio.done"
    assert await client.receive_text() == DONE
    assert await client.receive_close() == (1000, "bye")
    await client.close()
