"""Speech sessions over real loopback sockets: a client, the proxy, and a worker with a script."""

from __future__ import annotations

import json

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
    Request,
    TextMessage,
)

from omni_proxy.dataplane.websocket import relay
from tests.dataplane.loop_script import until
from tests.dataplane.speech_fixture import (
    CONFIG,
    DONE,
    PATH,
    Socket,
    Worker,
    heard_all,
    listen,
    narrate,
    running,
    speak,
)


async def test_a_session_passes_both_ways_and_ends_with_the_workers_own_words():
    async with running(Worker(narrate)) as setting:
        async with setting.client() as client:
            await speak(client)
            await heard_all(client)
        assert await setting.settled() == {"completed": 1}
        assert setting.counts() == (1, 0)
        assert setting.machine().consecutive_failures == 0
        assert setting.fleet.workers[0].in_flight == setting.dataplane.in_flight == 0


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


@pytest.mark.parametrize("keyed", [True, False])
async def test_sessions_with_one_key_stay_at_one_worker(keyed):
    workers = Worker(narrate), Worker(narrate)
    config = "[routing]\nsticky_sessions = true\n"
    async with running(*workers, config=config) as setting:
        headers = [(b"X-Session-Id", b"anna")] if keyed else []
        for _ in range(4):
            async with setting.client(PATH, headers) as client:
                await speak(client)
                await heard_all(client)
        await setting.settled()
    assert sorted(len(worker.requests) for worker in workers) == ([0, 4] if keyed else [2, 2])


@pytest.mark.parametrize("named", [None, b"1"])
async def test_the_handshake_names_the_data_parallel_rank(named):
    worker = Worker(narrate)
    async with running(worker, entries=[{"ranks": 2}]) as setting:
        headers = [(b"X-Data-Parallel-Rank", named)] if named else []
        for _ in range(2):
            async with setting.client(PATH, headers) as client:
                await speak(client)
                await heard_all(client)
        await setting.settled()
        found = [
            [value for name, value in request.extra_headers if name == b"x-data-parallel-rank"]
            for request in worker.requests
        ]
        assert found == ([[named]] * 2 if named else [[b"0"], [b"1"]])
        (only,) = setting.fleet.workers
        assert [rank.in_flight for rank in only.dp_ranks] == [0, 0]
        assert sum(rank.succeeded["tts_websocket"] for rank in only.dp_ranks if rank.succeeded) == 2


async def test_a_plain_get_gets_426_and_keeps_its_connection():
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
        setting.dataplane.voices.voices_changed(two.url)
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


async def test_without_a_worker_the_session_is_closed_with_try_again_later():
    async with running() as setting, setting.client() as client:
        await client.say(CONFIG)
        error = await client.error()
        assert error["message"].startswith("no eligible upstream")
        assert (error["code"], error["error_type"]) == (503, "server_error")
        assert (await client.closed())[0] == 1013


async def test_beyond_the_admission_limit_the_session_gets_an_error_and_is_closed():
    async with running(Worker(listen), config="max_inflight = 1\n") as setting:
        async with setting.client() as first:
            await first.say(CONFIG)
            async with setting.client() as second:
                error = await second.error()
                assert (error["code"], error["error_type"]) == (503, "overloaded_error")
                assert (await second.closed())[0] == 1013
        assert setting.dataplane.inflight.rejected == 1


async def test_with_a_queue_a_session_waits_for_a_worker():
    async with running(Worker(narrate), config="queue_size = 5\n") as setting:
        (worker,) = setting.fleet.workers
        setting.fleet.cordon(worker, "launch")
        async with setting.client() as client, trio.open_nursery() as nursery:
            nursery.start_soon(speak, client)
            await until(lambda: setting.dataplane.queue.waiting)
            setting.fleet.uncordon(worker, "launch")
        assert len(setting.workers[0].requests) == 1


async def test_a_silent_client_gets_a_config_timeout(monkeypatch):
    monkeypatch.setattr(relay, "CONFIG_SECS", 0.01)
    async with running(Worker(narrate)) as setting, setting.client() as client:
        error = await client.error()
        assert error["message"] == "session.config was not received before timeout"
        assert (error["code"], error["error_type"]) == (400, "invalid_request_error")
        assert (await client.closed())[0] == 1008


@pytest.mark.parametrize("first", [True, False])
async def test_a_message_past_its_limit_closes_both_sides(first):
    closings = []

    async def receive(socket):
        while not isinstance(event := await socket.event(), CloseConnection):
            assert len(event.data) < 1000
        closings.append(int(event.code))
        await socket.close()

    worker = Worker(receive)
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
        if not first:
            await worker.over.wait()
    assert closings == ([] if first else [1009])


async def test_only_the_first_message_may_be_longer_than_128_kib():
    heard = []

    async def receive(socket):
        heard.append(len(await socket.text()))
        await socket.say("go on")
        while not isinstance(event := await socket.event(), CloseConnection):
            heard.append(len(event.data))

    async with running(Worker(receive)) as setting, setting.client() as client:
        await client.say(CONFIG + " " * 1_000_000)
        assert await client.text() == "go on"
        await client.send(BytesMessage(data=b"x" * 131072))
        await client.send(BytesMessage(data=b"x" * 131073))
        assert (await client.error())["code"] == 413
        await setting.workers[0].over.wait()
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


async def test_pings_of_both_sides_are_answered_by_the_proxy():
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


ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "m2" }]
"""


async def test_the_first_message_of_a_session_for_an_alias_names_the_target():
    heard = []

    async def note(socket):
        heard.append(await socket.text())

    workers = Worker(note), Worker(note)
    entries = [{"model": "m1"}, {"model": "m2"}]
    async with running(*workers, config=ALIAS, entries=entries) as setting:
        async with setting.client() as client:
            await client.say('{"type":"session.config", "session":{"model": "alias","x":1.0}}')
            await client.error()
            await client.closed()
            await client.close()
        await setting.settled()
    assert heard == ['{"type":"session.config", "session":{"model": "m2","x":1.0}}']
    assert [len(worker.requests) for worker in workers] == [0, 1]
