"""How speech sessions end: workers that fail, clients that disconnect, and a proxy that drains."""

from __future__ import annotations

import contextlib

import pytest
import trio
import trio.testing
from wsproto.events import (
    BytesMessage,
    CloseConnection,
    Message,
)

from tests.dataplane.speech_fixture import (
    CONFIG,
    DONE,
    Worker,
    read_until_close,
    request_speech,
    run_proxy,
    serve_speech,
)


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
async def test_a_handshake_that_the_worker_refuses(status, message, error_type, code, failures):
    once = "[routing]\nmax_total_retries = 1\n"
    async with run_proxy(Worker(read_until_close, refuse=status), config=once) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            error = await client.receive_error()
            assert (error["message"], error["error_type"]) == (message, error_type)
            assert error["code"] == status
            assert (await client.receive_close())[0] == code
            await client.close()
        assert await proxy.wait_until_drained() == {"upstream_error": 1}
        assert proxy.health().consecutive_failures == failures
        assert proxy.counts() == (0, 1)


@pytest.mark.parametrize(("status", "failures"), [(500, 1), (501, 0), (503, 0), (429, 0)])
async def test_a_refused_handshake_counts_as_failed_like_a_response(status, failures):
    retried = '[routing]\nmax_total_retries = 1\nretry_on = ["500", "503", "429"]\n'
    async with run_proxy(Worker(read_until_close, refuse=status), config=retried) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            await client.receive_error()
            await client.close()
        await proxy.wait_until_drained()
        assert proxy.health().consecutive_failures == failures


async def test_several_refused_handshakes_of_one_session_count_once():
    retried = '[routing]\nmax_total_retries = 3\nretry_on = ["500"]\n'
    async with run_proxy(Worker(read_until_close, refuse=500), config=retried) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            await client.receive_error()
            await client.close()
        await proxy.wait_until_drained()
        assert proxy.health().consecutive_failures == 1


class Flooding(Worker):
    """Responds to a handshake with interim heads until the connection breaks."""

    async def _serve(self, stream):
        await stream.receive_some()
        with contextlib.suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"HTTP/1.1 102 Processing\r\n\r\n" * 30)


async def test_too_many_interim_responses_fail_the_handshake():
    once = "[routing]\nmax_total_retries = 1\n"
    async with run_proxy(Flooding(read_until_close), config=once) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            assert (await client.receive_error())["code"] == 502
            await client.receive_close()
            await client.close()
        assert await proxy.wait_until_drained() == {"upstream_error": 1}


async def test_a_session_is_retried_if_its_worker_cannot_be_reached():
    stopped, available = Worker(serve_speech), Worker(serve_speech)
    async with run_proxy(stopped, available) as proxy:
        stopped.listening.cancel()
        await stopped.stopped.wait()
        async with proxy.client() as client:
            await request_speech(client)
        assert proxy.health(0).consecutive_failures == 1
        assert proxy.counts(0) == (0, 1)
        assert len(available.requests) == 1


async def test_a_handshake_that_is_never_answered_fails_after_the_health_timeout():
    async def hang(stream):
        async with stream:
            await trio.sleep_forever()

    silent = Worker(read_until_close)
    silent._serve = hang
    async with run_proxy(silent, config="[health]\ntimeout_secs = 0.1\n") as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            error = await client.receive_error()
            assert (error["message"], error["code"]) == ("upstream WebSocket failed", 504)
            assert (await client.receive_close())[0] == 1011
        assert proxy.health().consecutive_failures == 1


@pytest.mark.parametrize(
    ("messages", "code", "failures", "error_expected"),
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
async def test_the_close_code_of_the_worker_decides_about_its_health(
    messages, code, failures, error_expected
):
    async def close(socket):
        await socket.receive_text()
        for text in messages:
            await socket.send_text(text)
        await socket.close(code, "a reason")
        await socket.receive_event()

    async with run_proxy(Worker(close)) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            for text in messages:
                assert await client.receive_text() == text
            if error_expected:
                error = await client.receive_error()
                assert error["message"] == "upstream WebSocket closed before session.done"
                assert (error["code"], error["error_type"]) == (502, "upstream_error")
            assert await client.receive_close() == (code, "a reason")
            await client.close()
        await proxy.wait_until_drained()
        assert proxy.health().consecutive_failures == failures
        assert proxy.counts() == ((1, 0) if DONE in messages else (0, 1))


async def test_a_worker_that_disconnects_within_a_message_is_an_upstream_failure():
    async def break_off(socket):
        await socket.receive_text()
        await socket.send(BytesMessage(data=b"half", message_finished=False))

    async with run_proxy(Worker(break_off)) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            # No error event can be sent within a message, so there is only a close code.
            assert (await client.receive_close())[0] == 1011
            await client.close()
        assert await proxy.wait_until_drained() == {"stream_error": 1}
        assert proxy.health().consecutive_failures == 1


async def test_a_worker_that_sends_invalid_frames_is_an_upstream_failure():
    async def send_garbage(socket):
        await socket.receive_text()
        await socket.stream.send_all(b"\xff\xff\xff\xff")
        await socket.receive_event()

    async with run_proxy(Worker(send_garbage)) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            assert (await client.receive_error())["code"] == 502
            assert (await client.receive_close())[0] == 1011
            await client.close()
        await proxy.wait_until_drained()
        assert proxy.health().consecutive_failures == 1


async def test_failed_audio_is_no_success():
    async def fail(socket):
        await socket.receive_text()
        await socket.send_text('{"type":"audio.done","error":true}')
        await socket.send_text(DONE)
        await socket.close()
        await socket.receive_event()

    async with run_proxy(Worker(fail)) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            while isinstance(await client.receive_event(), Message):
                pass
            await client.close()
        assert await proxy.wait_until_drained() == {"stream_error": 1}
        assert proxy.counts() == (0, 1)
        assert proxy.health().consecutive_failures == 0


async def test_a_client_that_disconnects_ends_the_session_at_its_worker():
    worker = Worker(read_until_close)
    async with run_proxy(worker) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            while not worker.requests:
                await trio.testing.wait_all_tasks_blocked(0.001)
        await worker.session_ended.wait()
        assert await proxy.wait_until_drained() == {"stream_cancelled": 1}
        assert proxy.health().consecutive_failures == 0


async def test_the_close_code_of_the_client_is_forwarded():
    closes = []

    async def receive(socket):
        await socket.receive_text()
        await socket.send_text("ready")
        closes.append(await socket.receive_close())
        await socket.close()

    worker = Worker(receive)
    async with run_proxy(worker) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            assert await client.receive_text() == "ready"
            await client.close(4444, "enough")
            assert await client.receive_close() == (4444, "enough")
        assert await proxy.wait_until_drained() == {"stream_cancelled": 1}
        await worker.session_ended.wait()
    assert closes == [(4444, "enough")]


async def test_a_client_that_violates_the_protocol_is_closed_with_1002():
    async with run_proxy(Worker(read_until_close)) as proxy, proxy.client() as client:
        await client.send_text(CONFIG)
        await client.stream.send_all(b"\x81\x02hi")  # not masked
        assert (await client.receive_close())[0] == 1002


async def test_the_proxy_does_not_read_from_the_worker_while_the_client_does_not_read():
    sent = []

    async def flood(socket):
        await socket.receive_text()
        with trio.move_on_after(5) as scope:
            for _ in range(4000):
                scope.deadline = trio.current_time() + 0.3
                await socket.send(BytesMessage(data=bytes(16384)))
                sent.append(16384)

    async with run_proxy(Worker(flood)) as proxy, proxy.client() as client:
        await client.send_text(CONFIG)
        await proxy.workers[0].session_ended.wait()
        assert 0 < len(sent) < 4000


async def test_a_client_that_never_reads_is_closed_after_idle_secs(monkeypatch):
    async def flood(socket):
        await socket.receive_text()
        while True:
            await socket.send(BytesMessage(data=bytes(65536)))

    worker = Worker(flood)
    config = "[server.timeouts]\nidle_secs = 0.2\n"
    async with run_proxy(worker, config=config) as proxy, proxy.client() as client:
        await client.send_text(CONFIG)
        await worker.session_ended.wait()
        assert await proxy.wait_until_drained() == {"client_stalled": 1}
        assert proxy.health().consecutive_failures == 0


async def test_an_idle_session_is_closed():
    config = "[server.timeouts]\nidle_secs = 0.2\n"
    async with (
        run_proxy(Worker(read_until_close), config=config) as proxy,
        proxy.client() as client,
    ):
        await client.send_text(CONFIG)
        assert (await client.receive_error())["code"] == 408
        assert (await client.receive_close())[0] == 1008


async def test_draining_waits_for_a_session_to_end():
    async with run_proxy(Worker(serve_speech)) as proxy:
        async with proxy.client() as client:
            await client.send_text(CONFIG)
            await client.receive_text()
            proxy.dataplane.begin_drain()
            await client.send_text('{"type":"input.done"}')
            while isinstance(event := await client.receive_event(), Message):
                pass
            assert isinstance(event, CloseConnection)
            await client.close()
        assert await proxy.wait_until_drained() == {"completed": 1}


async def test_ending_the_data_plane_finalizes_its_sessions():
    async with run_proxy(Worker(read_until_close)) as proxy, proxy.client() as client:
        await client.send_text(CONFIG)
        while not proxy.workers[0].requests:
            await trio.testing.wait_all_tasks_blocked(0.001)
    assert proxy.fleet.workers[0].in_flight == proxy.dataplane.in_flight == 0
