"""How speech sessions end: by workers that fail, clients that leave, a proxy that drains."""

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
    listen,
    narrate,
    running,
    speak,
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
async def test_what_a_refused_handshake_becomes(status, message, error_type, code, failures):
    once = "[routing]\nmax_total_retries = 1\n"
    async with running(Worker(listen, refuse=status), config=once) as setting:
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


@pytest.mark.parametrize(("status", "failures"), [(500, 1), (501, 0), (503, 0), (429, 0)])
async def test_a_handshake_counts_against_its_worker_as_an_answer_does(status, failures):
    retried = '[routing]\nmax_total_retries = 1\nretry_on = ["500", "503", "429"]\n'
    async with running(Worker(listen, refuse=status), config=retried) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            await client.error()
            await client.close()
        await setting.settled()
        assert setting.machine().consecutive_failures == failures


async def test_the_refusals_of_one_session_count_once_for_its_worker():
    retried = '[routing]\nmax_total_retries = 3\nretry_on = ["500"]\n'
    async with running(Worker(listen, refuse=500), config=retried) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            await client.error()
            await client.close()
        await setting.settled()
        assert setting.machine().consecutive_failures == 1


class Flooding(Worker):
    """Answers a handshake with interim heads, for as long as somebody listens."""

    async def _serve(self, stream):
        await stream.receive_some()
        with contextlib.suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"HTTP/1.1 102 Processing\r\n\r\n" * 30)


async def test_a_worker_that_floods_interim_answers_is_given_up():
    once = "[routing]\nmax_total_retries = 1\n"
    async with running(Flooding(listen), config=once) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            assert (await client.error())["code"] == 502
            await client.closed()
            await client.close()
        assert await setting.settled() == {"upstream_error": 1}


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
    ("message", "code", "failures", "reported"),
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
async def test_what_the_workers_close_means_for_its_health(message, code, failures, reported):
    async def leave(socket):
        await socket.text()
        for text in message:
            await socket.say(text)
        await socket.close(code, "so it is")
        await socket.event()

    async with running(Worker(leave)) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            for text in message:
                assert await client.text() == text
            if reported:
                error = await client.error()
                assert error["message"] == "upstream WebSocket closed before session.done"
                assert (error["code"], error["error_type"]) == (502, "upstream_error")
            assert await client.closed() == (code, "so it is")
            await client.close()
        await setting.settled()
        assert setting.machine().consecutive_failures == failures
        assert setting.counts() == ((1, 0) if DONE in message else (0, 1))


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

    async def receive(socket):
        await socket.text()
        await socket.say("ready")
        heard.append(await socket.closed())
        await socket.close()

    worker = Worker(receive)
    async with running(worker) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            assert await client.text() == "ready"
            await client.close(4444, "enough")
            assert await client.closed() == (4444, "enough")
        assert await setting.settled() == {"stream_cancelled": 1}
        await worker.over.wait()
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


async def test_an_idle_session_is_closed():
    config = "[server.timeouts]\nidle_secs = 0.2\n"
    async with running(Worker(listen), config=config) as setting, setting.client() as client:
        await client.say(CONFIG)
        assert (await client.error())["code"] == 408
        assert (await client.closed())[0] == 1008


async def test_draining_waits_for_a_session_to_end():
    async with running(Worker(narrate)) as setting:
        async with setting.client() as client:
            await client.say(CONFIG)
            await client.text()
            setting.dataplane.begin_drain()
            await client.say('{"type":"input.done"}')
            while isinstance(event := await client.event(), Message):
                pass
            assert isinstance(event, CloseConnection)
            await client.close()
        assert await setting.settled() == {"completed": 1}


async def test_ending_the_data_plane_finalizes_its_sessions():
    async with running(Worker(listen)) as setting, setting.client() as client:
        await client.say(CONFIG)
        while not setting.workers[0].requests:
            await trio.testing.wait_all_tasks_blocked(0.001)
    assert setting.fleet.workers[0].in_flight == setting.dataplane.in_flight == 0
