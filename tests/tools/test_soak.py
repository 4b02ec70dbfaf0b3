import json

import pytest

from tools.soak import report
from tools.soak.clients import Ledger, _judged
from tools.soak.hostile_clients import Attack, Request
from tools.soak.wire import Broken, Message, Reader, chunk, counted
from tools.soak.workers import HOSTILE, Worker


def reader_of(*pieces):
    """A reader whose peer sends these pieces and closes."""
    unread = list(pieces)

    class Stream:
        async def receive_some(self, _):
            return unread.pop(0) if unread else b""

    return Reader(Stream())


async def test_a_response_is_read_whole_after_interim_responses():
    reader = reader_of(b"HTTP/1.1 100 Continue\r\n\r\nHTT", counted(b"abc")[3:] + b"HTTP")
    response = await reader.message(answer=True)
    assert (response.status, response.body) == (200, b"abc")


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\n"],
        [counted(b"abc")[:-1]],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"abc")],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"zz\r\n"],
    ],
)
async def test_a_truncated_response_is_broken(pieces):
    with pytest.raises(Broken):
        await reader_of(*pieces).message(answer=True)


def streamed(nonce, count=2, end=b"data: [DONE]\n\n"):
    events = b"".join(b"data: %b\n\n" % json.dumps({"nonce": nonce}).encode() for _ in range(count))
    return Message("HTTP/1.1 200 OK", {}, events + end)


def test_a_stream_is_judged_by_its_end_and_its_nonce():
    assert _judged(streamed("a"), "a", streamed=True) == ""
    assert _judged(streamed("b"), "a", streamed=True) == "events of another request"
    assert _judged(streamed("a", end=b""), "a", streamed=True).startswith("broken stream")


def test_only_a_kill_shortly_before_excuses_a_broken_stream():
    ledger = Ledger(kills=[100.0])
    assert ledger.killed_since(100.5)
    assert ledger.killed_since(99.0)
    assert not ledger.killed_since(110.0)


def test_a_failed_check_is_marked_no():
    lines = [report.memory_line(100 * report.MIB, 0, 200 * report.MIB), report.none_of("x", [])]
    assert [line.holds for line in lines] == [False, True]
    assert "NO" in report.shown(lines).splitlines()[0]
    assert not report.descriptor_line(10, 10, 100).holds


@pytest.mark.parametrize("kind", HOSTILE)
async def test_each_hostile_worker_passes_its_health_check(kind, nursery):
    attack = Attack(await nursery.start(Worker("w", kind).serve, 0))
    assert await attack.status(Request("GET", "/health")) == 200


async def test_a_request_that_should_be_refused_and_succeeds_is_a_breach(nursery):
    attack = Attack(await nursery.start(Worker("w", "spoofs").serve, 0))
    await attack.refused("a stranger", Request("POST", "/workers"))
    assert attack.breaches == ["a stranger: POST /workers was answered 200"]
