"""Speech sessions over loopback sockets: a client, the proxy, and scripted workers."""

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

from omni_proxy.dataplane import websocket_relay
from tests.dataplane.loop_script import until
from tests.dataplane.speech_fixture import (
    CONFIG,
    DONE,
    PATH,
    Socket,
    Worker,
    read_until_close,
    receive_speech,
    request_speech,
    run_proxy,
    serve_speech,
)


async def test_a_session_is_relayed_both_ways_and_ends_with_the_workers_close():
    async with run_proxy(Worker(serve_speech)) as proxy:
        async with proxy.client() as client:
            await request_speech(client)
            await receive_speech(client)
        assert await proxy.wait_until_drained() == {"completed": 1}
        assert proxy.counts() == (1, 0)
        assert proxy.health().consecutive_failures == 0
        assert proxy.fleet.workers[0].in_flight == proxy.dataplane.in_flight == 0


async def test_the_handshake_keeps_fields_and_query_but_no_extensions():
    worker = Worker(serve_speech)
    async with run_proxy(worker) as proxy:
        headers = [
            (b"Authorization", b"Bearer key"), (b"X-Twice", b"1"), (b"X-Twice", b"2"),
            (b"Sec-WebSocket-Protocol", b"chat"),
            (b"Sec-WebSocket-Extensions", b"permessage-deflate"),
            (b"x-sglang-omni-route-capabilities", b"speech"),
        ]  # fmt: skip
        async with proxy.client(PATH + "?a=b&c", headers) as client:
            await request_speech(client)
            await client.receive_event()
        [request] = worker.requests
        assert request.target == PATH + "?a=b&c"
        assert request.host == worker.url.removeprefix("http://")
        assert request.subprotocols == request.extensions == []
        names = [name for name, _ in request.extra_headers]
        assert (b"authorization", b"Bearer key") in request.extra_headers
        assert [v for n, v in request.extra_headers if n == b"x-twice"] == [b"1", b"2"]
        assert b"x-sglang-omni-route-capabilities" not in names


@pytest.mark.parametrize("keyed", [True, False])
async def test_sessions_with_an_affinity_key_stay_at_one_worker(keyed):
    workers = Worker(serve_speech), Worker(serve_speech)
    config = "[routing]\nsticky_sessions = true\n"
    async with run_proxy(*workers, config=config) as proxy:
        headers = [(b"X-Session-Id", b"anna")] if keyed else []
        for _ in range(4):
            async with proxy.client(PATH, headers) as client:
                await request_speech(client)
                await receive_speech(client)
        await proxy.wait_until_drained()
    assert sorted(len(worker.requests) for worker in workers) == ([0, 4] if keyed else [2, 2])


@pytest.mark.parametrize("named", [None, b"1"])
async def test_the_handshake_names_the_data_parallel_rank(named):
    worker = Worker(serve_speech)
    async with run_proxy(worker, entries=[{"ranks": 2}]) as proxy:
        headers = [(b"X-Data-Parallel-Rank", named)] if named else []
        for _ in range(2):
            async with proxy.client(PATH, headers) as client:
                await request_speech(client)
                await receive_speech(client)
        await proxy.wait_until_drained()
        rank_fields = [
            [value for name, value in request.extra_headers if name == b"x-data-parallel-rank"]
            for request in worker.requests
        ]
        assert rank_fields == ([[named]] * 2 if named else [[b"0"], [b"1"]])
        (only,) = proxy.fleet.workers
        assert [rank.in_flight for rank in only.dp_ranks] == [0, 0]
        assert sum(rank.succeeded["tts_websocket"] for rank in only.dp_ranks if rank.succeeded) == 2


async def test_a_get_without_upgrade_gets_426_and_keeps_its_connection():
    async with run_proxy() as proxy:
        stream = await trio.open_tcp_stream(*proxy.address)
        async with stream:
            for _ in range(2):
                await stream.send_all(f"GET {PATH} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
                response = await stream.receive_some()
                assert response.startswith(b"HTTP/1.1 426 Upgrade Required\r\n")
                assert b"\r\nupgrade: websocket\r\n" in response


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ("sec-websocket-version: 8\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", 426),
        ("sec-websocket-version: 13\r\nsec-websocket-key: short", 400),
        ("sec-websocket-version: 13", 400),
    ],
)
async def test_an_invalid_handshake_is_rejected(fields, status):
    async with run_proxy() as proxy:
        stream = await trio.open_tcp_stream(*proxy.address)
        async with stream:
            head = (
                f"GET {PATH} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: WebSocket\r\n"
            )
            await stream.send_all(f"{head}{fields}\r\n\r\n".encode())
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 %d " % status)


async def test_frames_sent_along_with_the_handshake_are_not_lost():
    async with run_proxy(Worker(serve_speech)) as proxy:
        stream = await trio.open_tcp_stream(*proxy.address)
        async with stream:
            ws = WSConnection(ConnectionType.CLIENT)
            handshake = ws.send(Request(host="router", target=PATH))
            early = bytes([0x81, 0x80 | len(CONFIG), 0, 0, 0, 0]) + CONFIG.encode()
            await stream.send_all(handshake + early)
            client = Socket(stream, ws)
            assert isinstance(await client.receive_event(), AcceptConnection)
            assert json.loads(await client.receive_text()) == {"type": "session.configured"}


@pytest.mark.parametrize("nested", [True, False])
async def test_the_model_of_the_session_config_selects_the_worker(nested):
    one, two = Worker(serve_speech), Worker(serve_speech)
    entries = [{"model": "one"}, {"model": "two"}]
    async with run_proxy(one, two, entries=entries) as proxy:
        fields = {"model": "two"}
        config = {"type": "session.config", **({"session": fields} if nested else fields)}
        async with proxy.client() as client:
            await client.send_text(json.dumps(config))
            await client.receive_text()
        assert (len(one.requests), len(two.requests)) == (0, 1)


async def test_a_config_with_references_needs_audio_input():
    without_audio_input, capable = Worker(serve_speech), Worker(serve_speech)
    entries = [{"capabilities": ("speech", "streaming")}, {}]
    async with run_proxy(without_audio_input, capable, entries=entries) as proxy:
        config = {"type": "session.config", "session": {"references": [{"data": "AAAA"}]}}
        for _ in range(2):
            async with proxy.client() as client:
                await client.send_text(json.dumps(config))
                await client.receive_text()
        assert (len(without_audio_input.requests), len(capable.requests)) == (0, 2)


async def test_a_session_with_an_uploaded_voice_goes_to_the_voices_owner():
    one, two = Worker(serve_speech), Worker(serve_speech)
    async with run_proxy(one, two) as proxy:
        proxy.dataplane.voices.voices_changed(two.url)
        config = {"type": "session.config", "session": {"voice": "Ada"}}
        for _ in range(2):
            async with proxy.client() as client:
                await client.send_text(json.dumps(config))
                await client.receive_text()
        assert (len(one.requests), len(two.requests)) == (0, 2)


async def test_a_first_message_that_is_no_config_is_forwarded():
    async def refuse(socket):
        assert await socket.receive_text() == "hello"
        await socket.send_text('{"type":"error","message":"no config","error_type":"invalid"}')
        await socket.close(1008, "no config")
        await socket.receive_event()

    async with run_proxy(Worker(refuse)) as proxy:
        async with proxy.client() as client:
            await client.send_text("hello")
            assert (await client.receive_error())["message"] == "no config"
            assert await client.receive_close() == (1008, "no config")
            await client.close()
        assert await proxy.wait_until_drained() == {"stream_error": 1}
        assert proxy.health().consecutive_failures == 0
        assert proxy.counts() == (0, 1)


async def test_without_a_worker_the_session_is_closed_with_try_again_later():
    async with run_proxy() as proxy, proxy.client() as client:
        await client.send_text(CONFIG)
        error = await client.receive_error()
        assert error["message"].startswith("no eligible upstream")
        assert (error["code"], error["error_type"]) == (503, "server_error")
        assert (await client.receive_close())[0] == 1013


async def test_a_session_above_max_inflight_gets_an_error_and_is_closed():
    async with run_proxy(Worker(read_until_close), config="max_inflight = 1\n") as proxy:
        async with proxy.client() as first:
            await first.send_text(CONFIG)
            async with proxy.client() as second:
                error = await second.receive_error()
                assert (error["code"], error["error_type"]) == (503, "overloaded_error")
                assert (await second.receive_close())[0] == 1013
        assert proxy.dataplane.inflight.rejected == 1


async def test_with_a_queue_a_session_waits_for_a_worker():
    async with run_proxy(Worker(serve_speech), config="queue_size = 5\n") as proxy:
        (worker,) = proxy.fleet.workers
        proxy.fleet.cordon(worker, "launch")
        async with proxy.client() as client, trio.open_nursery() as nursery:
            nursery.start_soon(request_speech, client)
            await until(lambda: proxy.dataplane.queue.waiting)
            proxy.fleet.uncordon(worker, "launch")
        assert len(proxy.workers[0].requests) == 1


async def test_a_silent_client_gets_a_config_timeout(monkeypatch):
    monkeypatch.setattr(websocket_relay, "SPEECH_CONFIG_SECS", 0.01)
    async with run_proxy(Worker(serve_speech)) as proxy, proxy.client() as client:
        error = await client.receive_error()
        assert error["message"] == "session.config was not received before timeout"
        assert (error["code"], error["error_type"]) == (400, "invalid_request_error")
        assert (await client.receive_close())[0] == 1008


@pytest.mark.parametrize("first", [True, False])
async def test_a_message_above_the_size_limit_closes_both_sides(first):
    close_codes = []

    async def receive(socket):
        while not isinstance(event := await socket.receive_event(), CloseConnection):
            assert len(event.data) < 1000
        close_codes.append(int(event.code))
        await socket.close()

    worker = Worker(receive)
    async with run_proxy(worker, config="max_payload_size = 1000\n") as proxy:
        async with proxy.client() as client:
            if not first:
                await client.send_text(CONFIG)
            await client.send(TextMessage(data="x" * 600, message_finished=False))
            await client.send(TextMessage(data="x" * 401))
            error = await client.receive_error()
            assert error["message"] == "WebSocket message exceeds payload limit"
            assert error["code"] == 413
            assert (await client.receive_close())[0] == 1009
            await client.close()
        assert await proxy.wait_until_drained() == {"refused": 1}
        assert proxy.health().consecutive_failures == 0
        if not first:
            await worker.session_ended.wait()
    assert close_codes == ([] if first else [1009])


async def test_only_the_first_message_may_be_longer_than_128_kib():
    sizes = []

    async def receive(socket):
        sizes.append(len(await socket.receive_text()))
        await socket.send_text("ready")
        while not isinstance(event := await socket.receive_event(), CloseConnection):
            sizes.append(len(event.data))

    async with run_proxy(Worker(receive)) as proxy, proxy.client() as client:
        await client.send_text(CONFIG + " " * 1_000_000)
        assert await client.receive_text() == "ready"
        await client.send(BytesMessage(data=b"x" * 131072))
        await client.send(BytesMessage(data=b"x" * 131073))
        assert (await client.receive_error())["code"] == 413
        await proxy.workers[0].session_ended.wait()
    assert sizes == [len(CONFIG) + 1_000_000, 131072]


async def test_a_message_in_fragments_arrives_unchanged():
    async def echo(socket):
        while isinstance(event := await socket.receive_event(), Message):
            half = len(event.data) // 2
            await socket.send(type(event)(data=event.data[:half], message_finished=False))
            await socket.send(type(event)(data=event.data[half:]))

    async with run_proxy(Worker(echo)) as proxy, proxy.client() as client:
        for kind, data in (
            (TextMessage, "grüße " * 9),
            (BytesMessage, bytes(99)),
            (TextMessage, ""),
        ):
            await client.send(kind(data=data[:3], message_finished=False))
            await client.send(kind(data=data[3:]))
            assert await client.receive_event() == kind(data=data)


async def test_pings_of_both_sides_are_answered_by_the_proxy():
    async def ping(socket):
        await socket.receive_text()
        await socket.send(Ping(payload=b"from the worker"))
        assert await socket.receive_event() == Pong(payload=b"from the worker")
        await socket.send_text(DONE)
        await read_until_close(socket)

    async with run_proxy(Worker(ping)) as proxy, proxy.client() as client:
        await client.send(Ping(payload=b"before"))
        assert await client.receive_event() == Pong(payload=b"before")
        await client.send_text(CONFIG)
        assert await client.receive_text() == DONE
        await client.send(Ping(payload=b"after"))
        assert await client.receive_event() == Pong(payload=b"after")


ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "m2" }]
"""


async def test_the_first_message_of_a_session_for_an_alias_names_the_target():
    messages = []

    async def record(socket):
        messages.append(await socket.receive_text())

    workers = Worker(record), Worker(record)
    entries = [{"model": "m1"}, {"model": "m2"}]
    async with run_proxy(*workers, config=ALIAS, entries=entries) as proxy:
        async with proxy.client() as client:
            await client.send_text(
                '{"type":"session.config", "session":{"model": "alias","x":1.0}}'
            )
            await client.receive_error()
            await client.receive_close()
            await client.close()
        await proxy.wait_until_drained()
    assert messages == ['{"type":"session.config", "session":{"model": "m2","x":1.0}}']
    assert [len(worker.requests) for worker in workers] == [0, 1]
