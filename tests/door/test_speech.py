"""Speech sessions over real loopback sockets: a client, the door, and a worker with a script."""

from __future__ import annotations

import json
from collections import deque
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
import trio
import trio.testing
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Message,
    Ping,
    Pong,
    RejectConnection,
    Request,
    TextMessage,
)

from omni_proxy.config.capabilities import CAPABILITIES
from omni_proxy.config.overlay import Desired
from omni_proxy.config.parse import parse
from omni_proxy.door import speech
from omni_proxy.door.core import Door
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
    """A running door with its fleet."""

    def __init__(self, door, fleet, workers):
        self.door, self.fleet, self.workers = door, fleet, workers
        host, port = door.addresses()[0].rsplit(":", 1)
        self.address = host, int(port)

    @asynccontextmanager
    async def client(self, target=PATH, headers=()):
        stream = await trio.open_tcp_stream(*self.address)
        ws = WSConnection(ConnectionType.CLIENT)
        socket = Socket(stream, ws)
        async with stream:
            await socket.send(Request(host="router", target=target, extra_headers=list(headers)))
            assert isinstance(await socket.event(), AcceptConnection)
            yield socket

    def machine(self, index=0):
        return self.fleet.find(self.workers[index].url).machine

    def counts(self, index=0):
        worker = self.fleet.find(self.workers[index].url)
        return worker.succeeded["tts_websocket"], worker.failed["tts_websocket"]

    async def settled(self):
        """Until the door has no connection left."""
        await self.door.drained()
        return dict(self.door.ended)


def entry(url, model=None, capabilities=CAPABILITIES):
    return Desired(
        url=url, model=model, capabilities=frozenset(capabilities), disabled=False, weight=1,
        max_inflight=0, origin="file",
    )  # fmt: skip


@asynccontextmanager
async def running(*workers, config="", entries=None):
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for worker in workers:
                await worker.start(nursery)
            fleet = Fleet()
            told = entries or [{}] * len(workers)
            fleet.apply(
                [entry(worker.url, **more) for worker, more in zip(workers, told, strict=True)], NOW
            )
            for worker in fleet.workers:
                for _ in range(2):
                    fleet.observe_probe(worker, status=200, error=None, at=NOW, epoch=0)
            made = parse("[server]\nport = 0\n" + config)
            door = Door(fleet, made, front_socket="/nowhere", below=lambda n: 0)
            door.prepare(made)()
            await nursery.start(door.run)
            yield Setting(door, fleet, workers)
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


async def test_a_session_passes_both_ways_and_ends_with_the_workers_own_words():
    async with running(Worker(narrate)) as setting:
        async with setting.client() as client:
            await speak(client)
            audio = await client.event()
            assert isinstance(audio, BytesMessage)
            assert audio.data == bytes(range(256)) * 300
            assert json.loads(await client.text())["type"] == "audio.done"
            assert await client.text() == DONE
            assert await client.closed() == (1000, "bye")
            await client.close()
        assert await setting.settled() == {"completed": 1}
        assert setting.counts() == (1, 0)
        assert setting.machine().consecutive_failures == 0
        assert setting.fleet.workers[0].in_flight == setting.door.in_flight == 0


async def test_the_handshake_keeps_the_clients_fields_and_the_query_and_offers_nothing():
    worker = Worker(narrate)
    async with running(worker) as setting:
        headers = [
            (b"Authorization", b"Bearer key"), (b"X-Twice", b"1"), (b"X-Twice", b"2"),
            (b"Sec-WebSocket-Protocol", b"chat"),
            (b"Sec-WebSocket-Extensions", b"permessage-deflate"),
            (b"x-sglang-omni-route-capabilities", b"speech"),
        ]  # fmt: skip
        async with setting.client(PATH + "?a=b&c", headers) as client:
            await speak(client)
            await client.event()
        [request] = worker.requests
        assert request.target == PATH + "?a=b&c"
        assert request.host == worker.url.removeprefix("http://")
        assert request.subprotocols == request.extensions == []
        names = [name for name, _ in request.extra_headers]
        assert (b"authorization", b"Bearer key") in request.extra_headers
        assert [v for n, v in request.extra_headers if n == b"x-twice"] == [b"1", b"2"]
        assert b"x-sglang-omni-route-capabilities" not in names


async def test_a_plain_get_is_told_to_upgrade_and_keeps_its_connection():
    async with running() as setting:
        stream = await trio.open_tcp_stream(*setting.address)
        async with stream:
            for _ in range(2):
                await stream.send_all(f"GET {PATH} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
                answer = await stream.receive_some()
                assert answer.startswith(b"HTTP/1.1 426 Upgrade Required\r\n")
                assert b"\r\nupgrade: websocket\r\n" in answer


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ("sec-websocket-version: 8\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", 426),
        ("sec-websocket-version: 13\r\nsec-websocket-key: short", 400),
        ("sec-websocket-version: 13", 400),
    ],
)
async def test_a_bad_handshake_is_refused_before_it_is_accepted(fields, status):
    async with running() as setting:
        stream = await trio.open_tcp_stream(*setting.address)
        async with stream:
            top = f"GET {PATH} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: WebSocket\r\n"
            await stream.send_all(f"{top}{fields}\r\n\r\n".encode())
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 %d " % status)


async def test_frames_sent_along_with_the_handshake_are_not_lost():
    async with running(Worker(narrate)) as setting:
        stream = await trio.open_tcp_stream(*setting.address)
        async with stream:
            speaker = WSConnection(ConnectionType.CLIENT)
            speaker.initiate = speaker.send(Request(host="router", target=PATH))
            early = bytes([0x81, 0x80 | len(CONFIG), 0, 0, 0, 0]) + CONFIG.encode()
            await stream.send_all(speaker.initiate + early)
            client = Socket(stream, speaker)
            assert isinstance(await client.event(), AcceptConnection)
            assert json.loads(await client.text()) == {"type": "session.configured"}


@pytest.mark.parametrize("nested", [True, False])
async def test_the_model_of_the_config_picks_the_worker(nested):
    one, two = Worker(narrate), Worker(narrate)
    entries = [{"model": "one"}, {"model": "two"}]
    async with running(one, two, entries=entries) as setting:
        fields = {"model": "two"}
        config = {"type": "session.config", **({"session": fields} if nested else fields)}
        async with setting.client() as client:
            await client.say(json.dumps(config))
            await client.text()
        assert (len(one.requests), len(two.requests)) == (0, 1)


async def test_a_config_with_references_needs_audio_input():
    deaf, hearing = Worker(narrate), Worker(narrate)
    entries = [{"capabilities": ("speech", "streaming")}, {}]
    async with running(deaf, hearing, entries=entries) as setting:
        config = {"type": "session.config", "session": {"references": [{"data": "AAAA"}]}}
        for _ in range(2):
            async with setting.client() as client:
                await client.say(json.dumps(config))
                await client.text()
        assert (len(deaf.requests), len(hearing.requests)) == (0, 2)


async def test_an_uploaded_voice_stays_with_the_worker_that_keeps_it():
    one, two = Worker(narrate), Worker(narrate)
    async with running(one, two) as setting:
        setting.door.voice_owner = two.url
        config = {"type": "session.config", "session": {"voice": "Ada"}}
        for _ in range(2):
            async with setting.client() as client:
                await client.say(json.dumps(config))
                await client.text()
        assert (len(one.requests), len(two.requests)) == (0, 2)


async def test_a_first_message_that_is_no_config_is_for_the_worker_to_judge():
    async def refuse(socket):
        assert await socket.text() == "hello"
        await socket.say('{"type":"error","message":"no config","error_type":"invalid"}')
        await socket.close(1008, "no config")
        await socket.event()

    async with running(Worker(refuse)) as setting:
        async with setting.client() as client:
            await client.say("hello")
            assert (await client.error())["message"] == "no config"
            assert await client.closed() == (1008, "no config")
            await client.close()
        assert await setting.settled() == {"stream_error": 1}
        assert setting.machine().consecutive_failures == 0
        assert setting.counts() == (0, 1)


async def test_without_a_worker_the_session_is_told_to_try_again_later():
    async with running() as setting, setting.client() as client:
        await client.say(CONFIG)
        error = await client.error()
        assert error["message"].startswith("no eligible upstream")
        assert (error["code"], error["error_type"]) == (503, "server_error")
        assert (await client.closed())[0] == 1013


async def test_beyond_the_admission_bound_the_session_is_told_so_and_closed():
    async with running(Worker(listen), config="max_inflight = 1\n") as setting:
        async with setting.client() as first:
            await first.say(CONFIG)
            async with setting.client() as second:
                error = await second.error()
                assert (error["code"], error["error_type"]) == (503, "overloaded_error")
                assert (await second.closed())[0] == 1013
        assert setting.door.rejected == 1


async def test_a_silent_client_is_told_that_its_config_did_not_come(monkeypatch):
    monkeypatch.setattr(speech, "CONFIG_SECS", 0.01)
    async with running(Worker(narrate)) as setting, setting.client() as client:
        error = await client.error()
        assert error["message"] == "session.config was not received before timeout"
        assert (error["code"], error["error_type"]) == (400, "invalid_request_error")
        assert (await client.closed())[0] == 1008


@pytest.mark.parametrize("first", [True, False])
async def test_a_message_past_its_limit_closes_both_sides(first):
    closings = []

    async def hear(socket):
        while not isinstance(event := await socket.event(), CloseConnection):
            assert len(event.data) < 1000
        closings.append(int(event.code))
        await socket.close()

    worker = Worker(hear)
    async with running(worker, config="max_payload_size = 1000\n") as setting:
        async with setting.client() as client:
            if not first:
                await client.say(CONFIG)
            await client.send(TextMessage(data="x" * 600, message_finished=False))
            await client.send(TextMessage(data="x" * 401))
            error = await client.error()
            assert error["message"] == "WebSocket message exceeds payload limit"
            assert error["code"] == 413
            assert (await client.closed())[0] == 1009
            await client.close()
        assert await setting.settled() == {"refused": 1}
        assert setting.machine().consecutive_failures == 0
    assert closings == ([] if first else [1009])


async def test_only_the_first_message_may_be_longer_than_128_kib():
    heard = []

    async def hear(socket):
        heard.append(len(await socket.text()))
        await socket.say("go on")
        while not isinstance(event := await socket.event(), CloseConnection):
            heard.append(len(event.data))

    async with running(Worker(hear)) as setting, setting.client() as client:
        await client.say(CONFIG + " " * 1_000_000)
        assert await client.text() == "go on"
        await client.send(BytesMessage(data=b"x" * 131072))
        await client.send(BytesMessage(data=b"x" * 131073))
        assert (await client.error())["code"] == 413
    assert heard == [len(CONFIG) + 1_000_000, 131072]


async def test_fragments_of_a_message_arrive_as_the_same_message():
    async def echo(socket):
        while isinstance(event := await socket.event(), Message):
            half = len(event.data) // 2
            await socket.send(type(event)(data=event.data[:half], message_finished=False))
            await socket.send(type(event)(data=event.data[half:]))

    async with running(Worker(echo)) as setting, setting.client() as client:
        for kind, data in (
            (TextMessage, "grüße " * 9),
            (BytesMessage, bytes(99)),
            (TextMessage, ""),
        ):
            await client.send(kind(data=data[:3], message_finished=False))
            await client.send(kind(data=data[3:]))
            assert await client.event() == kind(data=data)


async def test_pings_of_both_sides_are_answered_by_the_door():
    async def ping(socket):
        await socket.text()
        await socket.send(Ping(payload=b"from the worker"))
        assert await socket.event() == Pong(payload=b"from the worker")
        await socket.say(DONE)
        await listen(socket)

    async with running(Worker(ping)) as setting, setting.client() as client:
        await client.send(Ping(payload=b"before"))
        assert await client.event() == Pong(payload=b"before")
        await client.say(CONFIG)
        assert await client.text() == DONE
        await client.send(Ping(payload=b"after"))
        assert await client.event() == Pong(payload=b"after")


@pytest.mark.parametrize(
    ("status", "message", "error_type", "code", "failures"),
    [
        (429, "upstream WebSocket is overloaded", "overloaded_error", 1013, 0),
        (503, "upstream WebSocket is unavailable", "server_error", 1013, 0),
        (404, "upstream WebSocket rejected the request", "upstream_error", 1008, 0),
        (500, "upstream WebSocket failed", "upstream_error", 1011, 0),
        (502, "upstream WebSocket failed", "upstream_error", 1011, 1),
        (504, "upstream WebSocket failed", "upstream_error", 1011, 1),
    ],
)
async def test_what_a_refused_handshake_becomes(status, message, error_type, code, failures):
    async with running(Worker(listen, refuse=status)) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            error = await client.error()
            assert (error["message"], error["error_type"]) == (message, error_type)
            assert error["code"] == status
            assert (await client.closed())[0] == code
            await client.close()
        assert await setting.settled() == {"upstream_error": 1}
        assert setting.machine().consecutive_failures == failures
        assert setting.counts() == (0, 1)


async def test_a_worker_that_can_not_be_reached_is_passed_over_for_the_next():
    gone, there = Worker(narrate), Worker(narrate)
    async with running(gone, there) as setting:
        gone.listening.cancel()
        await gone.gone.wait()
        async with setting.client() as client:
            await speak(client)
        assert setting.machine(0).consecutive_failures == 1
        assert setting.counts(0) == (0, 1)
        assert len(there.requests) == 1


async def test_a_handshake_that_is_never_answered_fails_after_the_health_timeout():
    async def hang(stream):
        async with stream:
            await trio.sleep_forever()

    mute = Worker(listen)
    mute._serve = hang
    async with running(mute, config="[health]\ntimeout_secs = 0.1\n") as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            error = await client.error()
            assert (error["message"], error["code"]) == ("upstream WebSocket failed", 504)
            assert (await client.closed())[0] == 1011
        assert setting.machine().consecutive_failures == 1


@pytest.mark.parametrize(
    ("said", "code", "failures", "told"),
    [
        ([], 1000, 1, True),
        ([], 1011, 1, True),
        ([], 4001, 0, False),
        ([], 1013, 0, False),
        (['{"type":"error","message":"x","error_type":"y"}'], 1000, 0, False),
        ([DONE], 1000, 0, False),
        ([DONE], 4001, 0, False),
    ],
)
async def test_what_the_workers_close_means_for_its_health(said, code, failures, told):
    async def leave(socket):
        await socket.text()
        for text in said:
            await socket.say(text)
        await socket.close(code, "so it is")
        await socket.event()

    async with running(Worker(leave)) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            for text in said:
                assert await client.text() == text
            if told:
                error = await client.error()
                assert error["message"] == "upstream WebSocket closed before session.done"
                assert (error["code"], error["error_type"]) == (502, "upstream_error")
            assert await client.closed() == (code, "so it is")
            await client.close()
        await setting.settled()
        assert setting.machine().consecutive_failures == failures
        assert setting.counts() == ((1, 0) if DONE in said else (0, 1))


async def test_a_worker_that_breaks_off_is_an_upstream_failure():
    async def break_off(socket):
        await socket.text()
        await socket.send(BytesMessage(data=b"half", message_finished=False))

    async with running(Worker(break_off)) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            # No event can stand in the middle of a message: only the closing code is left.
            assert (await client.closed())[0] == 1011
            await client.close()
        assert await setting.settled() == {"stream_error": 1}
        assert setting.machine().consecutive_failures == 1


async def test_a_worker_that_sends_no_frames_is_an_upstream_failure():
    async def babble(socket):
        await socket.text()
        await socket.stream.send_all(b"\xff\xff\xff\xff")
        await socket.event()

    async with running(Worker(babble)) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            assert (await client.error())["code"] == 502
            assert (await client.closed())[0] == 1011
            await client.close()
        await setting.settled()
        assert setting.machine().consecutive_failures == 1


async def test_audio_that_failed_is_no_success():
    async def fail(socket):
        await socket.text()
        await socket.say('{"type":"audio.done","error":true}')
        await socket.say(DONE)
        await socket.close()
        await socket.event()

    async with running(Worker(fail)) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            while isinstance(await client.event(), Message):
                pass
            await client.close()
        assert await setting.settled() == {"stream_error": 1}
        assert setting.counts() == (0, 1)
        assert setting.machine().consecutive_failures == 0


async def test_a_client_that_leaves_ends_the_session_at_its_worker_at_once():
    worker = Worker(listen)
    async with running(worker) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            while not worker.requests:
                await trio.testing.wait_all_tasks_blocked(0.001)
        await worker.over.wait()
        assert await setting.settled() == {"stream_cancelled": 1}
        assert setting.machine().consecutive_failures == 0


async def test_a_client_that_closes_politely_hands_its_code_to_the_worker():
    heard = []

    async def hear(socket):
        await socket.text()
        await socket.say("ready")
        heard.append(await socket.closed())
        await socket.close()

    worker = Worker(hear)
    async with running(worker) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            assert await client.text() == "ready"
            await client.close(4444, "enough")
            assert await client.closed() == (4444, "enough")
        assert await setting.settled() == {"stream_cancelled": 1}
    assert heard == [(4444, "enough")]


async def test_a_client_that_breaks_the_protocol_is_closed_with_its_code():
    async with running(Worker(listen)) as setting, setting.client() as client:
        await client.say(CONFIG)
        await client.stream.send_all(b"\x81\x02hi")  # not masked
        assert (await client.closed())[0] == 1002


async def test_a_client_that_does_not_read_stops_the_reading_from_its_worker():
    sent = []

    async def pour(socket):
        await socket.text()
        with trio.move_on_after(5) as scope:
            for _ in range(4000):
                scope.deadline = trio.current_time() + 0.3
                await socket.send(BytesMessage(data=bytes(16384)))
                sent.append(16384)

    async with running(Worker(pour)) as setting, setting.client() as client:
        await client.say(CONFIG)
        await setting.workers[0].over.wait()
        assert 0 < len(sent) < 4000


async def test_a_client_that_never_reads_again_is_cut(monkeypatch):
    async def pour(socket):
        await socket.text()
        while True:
            await socket.send(BytesMessage(data=bytes(65536)))

    worker = Worker(pour)
    config = "[server.timeouts]\nidle_secs = 0.2\n"
    async with running(worker, config=config) as setting, setting.client() as client:
        await client.say(CONFIG)
        await worker.over.wait()
        assert await setting.settled() == {"client_stalled": 1}
        assert setting.machine().consecutive_failures == 0


async def test_a_session_in_which_nobody_speaks_is_closed():
    config = "[server.timeouts]\nidle_secs = 0.2\n"
    async with running(Worker(listen), config=config) as setting, setting.client() as client:
        await client.say(CONFIG)
        assert (await client.error())["code"] == 408
        assert (await client.closed())[0] == 1008


async def test_draining_lets_a_session_come_to_its_end():
    async with running(Worker(narrate)) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            await client.text()
            setting.door.begin_drain()
            await client.say('{"type":"input.done"}')
            while isinstance(event := await client.event(), Message):
                pass
            assert isinstance(event, CloseConnection)
            await client.close()
        assert await setting.settled() == {"completed": 1}


async def test_ending_the_door_settles_the_accounts_of_its_sessions():
    async with running(Worker(listen)) as setting, setting.client() as client:
        await client.say(CONFIG)
        while not setting.workers[0].requests:
            await trio.testing.wait_all_tasks_blocked(0.001)
    assert setting.fleet.workers[0].in_flight == setting.door.in_flight == 0
