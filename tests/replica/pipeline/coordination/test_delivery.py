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
    return DeliveryBacklog(cut or (lambda *reported: cuts.append(reported)), **bounds), cuts


async def test_chunks_are_delivered_in_order_before_the_end():
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


async def test_an_error_follows_the_chunks_before_it():
    line, _ = backlog()
    delivery = line.open("r")
    delivery.put(DeliveredChunk("s", {"text": "a"}))
    delivery.finish(RequestAborted())
    delivery.put(DeliveredChunk("s", {"text": "after the end"}))
    assert (await delivery.take()).chunk == {"text": "a"}
    with pytest.raises(RequestAborted, match="aborted"):
        await delivery.take()


async def test_counters_report_the_waits_of_each_stage(autojump_clock):
    line, _ = backlog()
    slow, done = line.open("slow"), line.open("done")
    slow.put(DeliveredChunk("s", {"audio_data": b"x" * 1000}))
    done.finish(DeliveryEnd({}))
    await trio.sleep(7)
    reported = line.counters()
    assert reported["stream_backlog_bytes"] > 1000
    assert reported["longest_reader_idle_s"] == 7
    assert (reported["open_stream_count"], reported["generation_finished_stream_count"]) == (2, 1)
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
    reported = line.counters()
    assert (reported["failed_stream_count"], reported["stream_backlog_bytes"]) == (1, 0)


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


def assembled(splitter):
    assembly = ChunkAssembler("r")
    for chunk in splitter.pending:
        assembly.add(chunk)
    return assembly.result()


@given(st.lists(st.text(max_size=3), max_size=5), st.text(max_size=3), st.booleans())
def test_each_text_is_sent_once_however_much_was_streamed(pieces, tail, early):
    whole = {
        "text": "".join(pieces) + tail,
        "finish_reason": "length",
        "usage": {"total_tokens": 3},
    }
    splitter = ChunkSplitter("r")
    for piece in pieces:
        splitter.add_part("d", {"text": piece}, whole=False)
    if early:  # the stage has ended while another one still works
        splitter.add_part("d", whole, whole=True)
    splitter.end({"d": whole, "s": {"audio_data": b"1234", "sample_rate": 8000}})
    *others, last = splitter.pending
    assert last.terminal
    assert not any(chunk.terminal or chunk.finish_reason for chunk in others)
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


def test_audio_alone_is_an_answer():
    splitter = ChunkSplitter("r")
    splitter.add_part("s", {"audio_data": b"1234", "sample_rate": 8000}, whole=False)
    splitter.end({"s": {"audio_data": b"12345678", "sample_rate": 8000}})
    first, last = splitter.pending
    assert (first.audio, first.modality, first.terminal) == (b"1234", "audio", False)
    assert (last.audio, last.modality, last.finish_reason) == (b"5678", "audio", "stop")


def test_what_is_not_known_here_is_passed_on():
    splitter = ChunkSplitter("r")
    splitter.end({"t": {"text": "a", "language": "en"}, "e": {"embedding": [0.5]}})
    assert assembled(splitter).extra == {"language": "en", "embedding": [0.5]}


@given(st.text(max_size=12), CUTS, st.booleans())
def test_pieces_and_rest_are_the_whole(text, cuts, complete):
    ends = sorted(min(cut, len(text)) for cut in cuts) + ([len(text)] if complete else [])
    whole = {"text": text, "token_ids": list(range(len(text))), "audio_data": text.encode("utf-32")}
    sent, got, start = StreamedLengths(), [], 0
    for end in ends:
        audio = text[start:end].encode("utf-32-le")
        piece = {"text": text[start:end], "token_ids": list(range(start, end)), "audio_data": audio}
        sent.add(piece)
        got.append(piece)
        start = end
    rest = sent.remaining(whole | {"audio_data": text.encode("utf-32-le"), "finish_reason": "stop"})
    got.append(rest)
    assert "".join(piece["text"] for piece in got) == text
    assert [token for piece in got for token in piece["token_ids"]] == list(range(len(text)))
    assert b"".join(piece["audio_data"] for piece in got) == text.encode("utf-32-le")
    assert rest["finish_reason"] == "stop"


def test_a_whole_without_what_was_streamed_stays_as_it_is():
    sent = StreamedLengths()
    sent.add({"text": "abc"})
    assert sent.remaining({"text": None, "usage": {}}) == {"text": None, "usage": {}}


def test_audio_and_text_count_by_their_length():
    empty = size_bytes({})
    assert size_bytes({"audio_data": b"x" * 1000}) == empty + 1000
    assert size_bytes({"text": "x" * 10, "token_ids": [1, 2]}) == empty + 26
