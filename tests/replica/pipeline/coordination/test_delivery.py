import pytest
import trio
import trio.testing

from omni_proxy.replica.pipeline.coordination.delivery import (
    DeliveredChunk,
    DeliveryBacklog,
    DeliveryEnd,
)
from omni_proxy.replica.pipeline.requests import RequestAborted, RequestFailed


def backlog(cut=None, **bounds):
    cuts = []
    return DeliveryBacklog(cut or (lambda *told: cuts.append(told)), **bounds), cuts


async def test_pieces_come_in_order_and_then_the_end():
    line, _ = backlog()
    delivery = line.open("r")
    got = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def read():
            while not isinstance(item := await delivery.take(), DeliveryEnd):
                got.append(item.chunk["text"])
            got.append(item.results)

        await trio.testing.wait_all_tasks_blocked()
        for letter in "abc":
            delivery.put(DeliveredChunk("s", {"text": letter}))
        delivery.finish(DeliveryEnd({"s": {}}))
        delivery.finish(RequestFailed("too late"))
    assert got == ["a", "b", "c", {"s": {}}]


async def test_an_error_comes_after_the_pieces_before_it():
    line, _ = backlog()
    delivery = line.open("r")
    delivery.put(DeliveredChunk("s", {"text": "a"}))
    delivery.finish(RequestAborted())
    delivery.put(DeliveredChunk("s", {"text": "after the end"}))
    assert (await delivery.take()).chunk == {"text": "a"}
    with pytest.raises(RequestAborted, match="aborted"):
        await delivery.take()


async def test_counters_report_what_waits_for_whom(autojump_clock):
    line, _ = backlog()
    slow, done = line.open("slow"), line.open("done")
    slow.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    done.finish(DeliveryEnd({}))
    await trio.sleep(7)
    told = line.counters()
    assert told["stream_backlog_bytes"] > 1000
    assert told["longest_reader_idle_s"] == 7
    assert (told["open_stream_count"], told["generation_finished_stream_count"]) == (2, 1)
    await slow.take()
    assert line.counters()["longest_reader_idle_s"] == 0
    line.close(slow)
    line.close(done)
    assert set(line.counters().values()) == {0}


async def test_a_reader_that_had_nothing_to_take_has_not_idled(autojump_clock):
    line, _ = backlog()
    delivery = line.open("r")
    await trio.sleep(60)
    delivery.put(DeliveredChunk("s", {"text": "a"}))
    assert line.counters()["longest_reader_idle_s"] == 0


async def test_one_reader_past_its_bound_is_cut_and_what_waited_is_forgotten():
    line, cuts = backlog(reader_bytes=2000)
    delivery = line.open("r")
    delivery.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    assert not cuts
    delivery.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    ((request_id, error),) = cuts
    assert (request_id, error.status) == ("r", 503)
    assert "too slow" in error.message
    told = line.counters()
    assert (told["failed_stream_count"], told["stream_backlog_bytes"]) == (1, 0)


async def test_past_the_common_bound_the_reader_that_idled_longest_is_cut(autojump_clock):
    line, cuts = backlog(total_bytes=3000)
    idle, busy = line.open("idle"), line.open("busy")
    idle.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    await trio.sleep(1)
    busy.put(DeliveredChunk("s", {"audio_data": b"x" * 500}))
    busy.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    assert [request_id for request_id, _ in cuts] == ["idle"]
    assert busy.waiting_bytes > 1500


async def test_a_closed_delivery_leaves_nothing_behind():
    line, _ = backlog()
    delivery = line.open("r")
    delivery.put(DeliveredChunk("s", {"text": "a"}))
    line.close(delivery)
    line.close(delivery)
    assert set(line.counters().values()) == {0}
