import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.pipeline.coordination.delivery import (
    ChunkAssembler,
    ChunkSplitter,
    DeliveredChunk,
    DeliveryBacklog,
    DeliveryEnd,
    StreamedLengths,
    size_bytes,
)
from omni_proxy.replica.pipeline.requests import RequestAborted, RequestFailed

CUTS = st.lists(st.integers(0, 12), max_size=6)


def backlog(cut=None, **bounds):
    cuts = []
    return DeliveryBacklog(cut or (lambda *arguments: cuts.append(arguments)), **bounds), cuts


async def test_chunks_are_delivered_in_order_before_the_end():
    deliveries, _ = backlog()
    delivery = deliveries.open("r")
    received = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def read():
            while not isinstance(item := await delivery.take(), DeliveryEnd):
                received.append(item.chunk["text"])
            received.append(item.results)

        await trio.testing.wait_all_tasks_blocked()
        for letter in "abc":
            delivery.put(DeliveredChunk("s", {"text": letter}))
        delivery.finish(DeliveryEnd({"s": {}}))
        delivery.finish(RequestFailed("too late"))
    assert received == ["a", "b", "c", {"s": {}}]


async def test_an_error_follows_the_chunks_before_it():
    deliveries, _ = backlog()
    delivery = deliveries.open("r")
    delivery.put(DeliveredChunk("s", {"text": "a"}))
    delivery.finish(RequestAborted())
    delivery.put(DeliveredChunk("s", {"text": "after the end"}))
    assert (await delivery.take()).chunk == {"text": "a"}
    with pytest.raises(RequestAborted, match="aborted"):
        await delivery.take()


async def test_the_counters_have_the_backlog_and_the_idle_time_of_readers(autojump_clock):
    deliveries, _ = backlog()
    slow, done = deliveries.open("slow"), deliveries.open("done")
    slow.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    done.finish(DeliveryEnd({}))
    await trio.sleep(7)
    counters = deliveries.counters()
    assert counters["stream_backlog_bytes"] > 1000
    assert counters["longest_reader_idle_s"] == 7
    assert (counters["open_stream_count"], counters["generation_finished_stream_count"]) == (2, 1)
    await slow.take()
    assert deliveries.counters()["longest_reader_idle_s"] == 0
    deliveries.close(slow)
    deliveries.close(done)
    assert set(deliveries.counters().values()) == {0}


async def test_a_reader_without_waiting_chunks_does_not_count_as_idle(autojump_clock):
    deliveries, _ = backlog()
    delivery = deliveries.open("r")
    await trio.sleep(60)
    delivery.put(DeliveredChunk("s", {"text": "a"}))
    assert deliveries.counters()["longest_reader_idle_s"] == 0


async def test_a_reader_over_its_limit_is_failed_and_its_chunks_dropped():
    deliveries, cuts = backlog(reader_bytes=2000)
    delivery = deliveries.open("r")
    delivery.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    assert not cuts
    delivery.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    ((request_id, error),) = cuts
    assert (request_id, error.status) == ("r", 503)
    assert "too slow" in error.message
    counters = deliveries.counters()
    assert (counters["failed_stream_count"], counters["stream_backlog_bytes"]) == (1, 0)


async def test_over_the_total_limit_the_reader_that_idled_longest_is_failed(autojump_clock):
    deliveries, cuts = backlog(total_bytes=3000)
    idle, busy = deliveries.open("idle"), deliveries.open("busy")
    idle.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    await trio.sleep(1)
    busy.put(DeliveredChunk("s", {"audio_data": b"x" * 500}))
    busy.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    assert [request_id for request_id, _ in cuts] == ["idle"]
    assert busy.waiting_bytes > 1500


async def test_a_closed_delivery_leaves_nothing_behind():
    deliveries, _ = backlog()
    delivery = deliveries.open("r")
    delivery.put(DeliveredChunk("s", {"text": "a"}))
    deliveries.close(delivery)
    deliveries.close(delivery)
    assert set(deliveries.counters().values()) == {0}


def assembled(splitter):
    assembler = ChunkAssembler("r")
    for chunk in splitter.pending:
        assembler.add(chunk)
    return assembler.result()


@given(st.lists(st.text(max_size=3), max_size=5), st.text(max_size=3), st.booleans())
def test_each_text_is_sent_once_whatever_part_was_streamed(pieces, tail, ends_first):
    whole = {
        "text": "".join(pieces) + tail,
        "finish_reason": "length",
        "usage": {"total_tokens": 3},
    }
    splitter = ChunkSplitter("r")
    for piece in pieces:
        splitter.add_part("d", {"text": piece}, whole=False)
    if ends_first:  # the stage has ended, and another one still runs
        splitter.add_part("d", whole, whole=True)
    splitter.end({"d": whole, "s": {"audio_data": b"1234", "sample_rate": 8000}})
    *earlier, last = splitter.pending
    assert last.terminal
    assert not any(chunk.terminal or chunk.finish_reason for chunk in earlier)
    result = assembled(splitter)
    assert result.text == whole["text"]
    assert (result.finish_reason, result.usage) == ("length", {"total_tokens": 3})
    assert (result.audio, result.sample_rate) == (b"1234", 8000)


def test_tokens_and_logprobs_are_delivered_once():
    splitter = ChunkSplitter("r")
    splitter.add_part(
        "d", {"token_ids": [1], "output_token_logprobs": [[-1, 1, None]]}, whole=False
    )
    whole = {"token_ids": [1, 2], "output_token_logprobs": [[-1, 1, None], [-2, 2, None]]}
    splitter.end({"d": {"text": "", **whole}})
    result = assembled(splitter)
    assert result.token_ids == [1, 2]
    assert result.logprobs == [[-1, 1, None], [-2, 2, None]]


def test_a_result_may_have_only_audio():
    splitter = ChunkSplitter("r")
    splitter.add_part("s", {"audio_data": b"1234", "sample_rate": 8000}, whole=False)
    splitter.end({"s": {"audio_data": b"12345678", "sample_rate": 8000}})
    first, last = splitter.pending
    assert (first.audio, first.modality, first.terminal) == (b"1234", "audio", False)
    assert (last.audio, last.modality, last.finish_reason) == (b"5678", "audio", "stop")


def test_unknown_fields_are_passed_on():
    splitter = ChunkSplitter("r")
    splitter.end({"t": {"text": "a", "language": "en"}, "e": {"embedding": [0.5]}})
    assert assembled(splitter).extra == {"language": "en", "embedding": [0.5]}


@given(st.text(max_size=12), CUTS, st.booleans())
def test_the_streamed_parts_and_the_rest_are_the_whole(text, cuts, complete):
    ends = sorted(min(cut, len(text)) for cut in cuts) + ([len(text)] if complete else [])
    whole = {"text": text, "token_ids": list(range(len(text))), "audio_data": text.encode("utf-32")}
    streamed, pieces, start = StreamedLengths(), [], 0
    for end in ends:
        audio = text[start:end].encode("utf-32-le")
        piece = {"text": text[start:end], "token_ids": list(range(start, end)), "audio_data": audio}
        streamed.add(piece)
        pieces.append(piece)
        start = end
    rest = streamed.remaining(
        whole | {"audio_data": text.encode("utf-32-le"), "finish_reason": "stop"}
    )
    pieces.append(rest)
    assert "".join(piece["text"] for piece in pieces) == text
    assert [token for piece in pieces for token in piece["token_ids"]] == list(range(len(text)))
    assert b"".join(piece["audio_data"] for piece in pieces) == text.encode("utf-32-le")
    assert rest["finish_reason"] == "stop"


def test_a_result_without_the_streamed_field_is_unchanged():
    streamed = StreamedLengths()
    streamed.add({"text": "abc"})
    assert streamed.remaining({"text": None, "usage": {}}) == {"text": None, "usage": {}}


def test_the_size_of_a_chunk_is_that_of_its_audio_text_and_tokens():
    empty = size_bytes({})
    assert size_bytes({"audio_data": b"x" * 1000}) == empty + 1000
    assert size_bytes({"text": "x" * 10, "token_ids": [1, 2]}) == empty + 26
