import msgspec
import pytest

from omni_proxy.replica.pipeline.stage_messages import (
    ProfilerStart,
    Result,
    ResultChunk,
    StageFailure,
    StreamChunk,
)
from tests.replica.text.scheduler_harness import (
    SchedulerHarness,
    long_prompt,
    tiny,
    tokens_of,
    undisturbed,
)

GREEDY = {"temperature": 0, "max_new_tokens": 40}


def test_a_stream_has_the_text_of_the_complete_response():
    harness = SchedulerHarness()
    harness.submit("whole", **GREEDY)
    harness.submit("stream", stream=True, **GREEDY)
    harness.finish()
    complete = harness.result("whole")
    assert harness.streamed("stream") == harness.result("stream")["text"] == complete["text"]
    assert len(complete["text"]) > 60
    assert not harness.emitted_for(ResultChunk, "whole")
    chunks = harness.emitted_for(ResultChunk, "stream")
    assert [chunk.chunk_id for chunk in chunks] == list(range(len(chunks)))
    ids = [token for chunk in chunks for token in chunk.chunk["token_ids"]]
    assert ids == complete["token_ids"]


def test_the_result_counts_its_tokens():
    result = undisturbed("The sea", temperature=0, max_new_tokens=9)
    prompt_tokens = len(tokens_of("The sea"))
    assert result["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 9,
        "total_tokens": prompt_tokens + 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert len(result["token_ids"]) == 9
    assert tiny().tokenizer.decode(result["token_ids"]) == result["text"]
    assert result["finish_reason"] == "length"
    assert result["weight_version"] == "default"
    assert "output_token_logprobs" not in result


def test_the_engine_time_counts_from_arrival():
    harness = SchedulerHarness()
    harness.submit("a", max_new_tokens=2)
    harness.clock.now_s = 2.5
    harness.finish()
    assert harness.result("a")["engine_time_s"] == 2.5


def test_each_token_has_one_log_probability():
    harness = SchedulerHarness()
    harness.submit("a", stream=True, logprobs=True, **GREEDY)
    harness.finish()
    result = harness.result("a")
    rows = result["output_token_logprobs"]
    assert [token for _, token, _ in rows] == result["token_ids"]
    assert all(logprob < 0 and text is None for logprob, _, text in rows)
    streamed = [
        row
        for chunk in harness.emitted_for(ResultChunk, "a")
        for row in chunk.chunk["output_token_logprobs"]
    ]
    assert streamed == rows


def test_every_emitted_message_round_trips_through_msgpack():
    harness = SchedulerHarness()
    harness.submit("a", stream=True, logprobs=True, max_new_tokens=3)
    harness.finish()
    for message in harness.emitted:
        packed = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(packed, type=type(message)) == message


def test_a_stop_string_ends_the_text_and_is_not_part_of_it():
    text = undisturbed(**GREEDY)["text"]
    stop = text[20:26]
    harness = SchedulerHarness()
    harness.submit("a", stream=True, stop=["never there", stop], **GREEDY)
    harness.finish()
    result = harness.result("a")
    assert result["text"] == harness.streamed("a") == text[: text.index(stop)]
    assert (result["finish_reason"], result["stop_hit"]) == ("stop", stop)
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) < 40


def test_the_beginning_of_a_stop_string_is_released_at_the_end():
    text = undisturbed(**GREEDY)["text"]
    harness = SchedulerHarness()
    harness.submit("a", stream=True, stop=text[-4:] + "###", **GREEDY)
    harness.finish()
    assert harness.streamed("a") == harness.result("a")["text"] == text
    assert harness.result("a")["finish_reason"] == "length"


def test_a_stop_token_ends_the_text_and_is_counted():
    complete = undisturbed(**GREEDY)
    index = 12
    token = complete["token_ids"][index]
    first = complete["token_ids"].index(token)
    result = undisturbed(stop_token_ids=[token], **GREEDY)
    assert result["token_ids"] == complete["token_ids"][: first + 1]
    assert result["text"] == tiny().tokenizer.decode(complete["token_ids"][:first])
    assert (result["finish_reason"], result["stop_hit"]) == ("stop", token)


def test_a_seed_gives_the_same_text_alone_and_in_a_batch():
    params = {"seed": 42, "temperature": 1.3, "top_p": 0.9, "max_new_tokens": 60}
    expected = undisturbed("A song of", **params)["text"]
    harness = SchedulerHarness()
    for number in range(15):
        harness.submit(
            f"other {number}", f"{number} " * number + "song", max_new_tokens=50 + number
        )
        harness.step()
    harness.submit("mine", "A song of", **params)
    harness.finish()
    assert harness.result("mine")["text"] == expected
    assert undisturbed("A song of", **{**params, "seed": 43})["text"] != expected


def test_sixteen_requests_in_one_batch_give_the_results_of_each_alone():
    prompts = [f"Chapter {number}: the sea" for number in range(16)]
    harness = SchedulerHarness(prefill_chunk=1000)
    for number, prompt in enumerate(prompts):
        harness.submit(f"r{number}", prompt, stream=True, **GREEDY)
    harness.finish()
    assert [len(batch) for batch in harness.worker.batches] == [16] * 40
    for number, prompt in enumerate(prompts):
        assert harness.result(f"r{number}")["text"] == undisturbed(prompt, **GREEDY)["text"]


def test_requests_over_the_running_limit_wait_in_order():
    harness = SchedulerHarness(max_running=2)
    for number in range(5):
        harness.submit(f"r{number}", max_new_tokens=3)
    harness.finish()
    assert max(len(batch) for batch in harness.worker.batches) == 2
    assert [message.request_id for message in harness.emitted] == [
        f"r{number}" for number in range(5)
    ]


def test_a_long_prompt_delays_a_running_response_by_one_chunk_per_token():
    harness = SchedulerHarness(prefill_chunk=32)
    harness.submit("short", stream=True, temperature=0, max_new_tokens=60)
    harness.step()
    harness.submit("long", long_prompt(320), max_new_tokens=2)
    for step in range(1, 10):
        harness.step()
        assert len(harness.scheduler.batch_queue.find("short").tokens) == len(
            tokens_of("The sea")
        ) + 1 + (step)
        assert harness.worker.batches[-1] == [1, 32]
    harness.finish()
    assert harness.result("long")["usage"]["prompt_tokens"] == 320


def test_prefills_share_the_chunk_of_a_batch():
    harness = SchedulerHarness(prefill_chunk=32)
    for name in "abc":
        harness.submit(name, long_prompt(20), max_new_tokens=2)
    harness.finish()
    # All of a and part of b; then a decodes, with the rest of b and all of c; then b and c decode.
    assert harness.worker.batches == [[20, 12], [1, 8, 20], [1, 1]]


def test_a_chunked_prompt_gives_the_result_of_an_unchunked_one():
    prompt = long_prompt(150)
    harness = SchedulerHarness(prefill_chunk=16)
    harness.submit("a", prompt, **GREEDY)
    harness.finish()
    assert harness.result("a")["text"] == undisturbed(prompt, **GREEDY)["text"]


def test_an_abort_frees_its_tokens_at_once_and_nothing_more_is_emitted():
    harness = SchedulerHarness(cache_entries=4)
    harness.submit("gone", long_prompt(40), stream=True, max_new_tokens=100)
    harness.submit("stays", max_new_tokens=12)
    harness.step(5)
    chunks = len(harness.emitted_for(ResultChunk, "gone"))
    used = harness.scheduler.batch_queue.used_tokens
    assert chunks
    harness.abort("gone")
    assert harness.scheduler.batch_queue.used_tokens < used - 40
    harness.step()
    assert len(harness.worker.batches[-1]) == 1
    harness.finish()
    assert len(harness.emitted_for(ResultChunk, "gone")) == chunks
    assert not harness.emitted_for(Result, "gone")
    assert not harness.emitted_for(StageFailure, "gone")
    assert harness.result("stays")["usage"]["completion_tokens"] == 12
    harness.scheduler.emit_stats()
    assert harness.stats()["aborted_total"] == 1


def test_an_abort_reaches_waiting_requests_and_ignores_unknown_ones():
    harness = SchedulerHarness(max_running=1)
    harness.submit("runs", max_new_tokens=3)
    harness.submit("waits", max_new_tokens=3)
    harness.submit("embeds", task="embed")
    for name in ("waits", "embeds", "unknown"):
        harness.abort(name)
    harness.finish()
    assert [message.request_id for message in harness.emitted] == ["runs"]


def test_running_out_of_tokens_retracts_later_requests_and_changes_no_text():
    harness = SchedulerHarness(max_total_tokens=300, prefill_chunk=64)
    prompts = [long_prompt(30, number) for number in range(5)]
    for number, prompt in enumerate(prompts):
        harness.submit(f"r{number}", prompt, stream=True, temperature=0, max_new_tokens=90)
    begun, used_tokens = {}, []
    while harness.scheduler.busy:
        harness.step()
        used_tokens.append(harness.scheduler.batch_queue.used_tokens)
        begun |= {request.request_id: request.begun for request in harness.scheduler.batch_queue}
    assert max(used_tokens) <= 300
    assert begun["r0"] == 1
    assert max(begun.values()) > 1  # at least one request was retracted
    for number, prompt in enumerate(prompts):
        expected = undisturbed(prompt, temperature=0, max_new_tokens=90)["text"]
        assert harness.result(f"r{number}")["text"] == harness.streamed(f"r{number}") == expected


def test_a_cached_prefix_is_not_recomputed_and_changes_no_text():
    prompt = long_prompt(120)
    harness = SchedulerHarness(cache_entries=4)
    harness.submit("cold", prompt, **GREEDY)
    harness.finish()
    batches_before = len(harness.worker.batches)
    harness.submit("warm", [*prompt[:100], *long_prompt(10, 77)], **GREEDY)
    harness.finish()
    assert harness.worker.batches[batches_before] == [10]
    usage = harness.result("warm")["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 100}
    expected = undisturbed([*prompt[:100], *long_prompt(10, 77)], **GREEDY)
    assert harness.result("warm")["text"] == expected["text"]
    harness.submit("same", prompt, **GREEDY)
    harness.finish()
    assert harness.result("same")["usage"]["prompt_tokens_details"] == {"cached_tokens": 119}
    assert harness.result("same")["text"] == harness.result("cold")["text"]


def test_the_next_turn_continues_from_the_cached_response():
    prompt = long_prompt(30)
    harness = SchedulerHarness(cache_entries=4)
    harness.submit("one", prompt, **GREEDY)
    harness.finish()
    response = harness.result("one")["token_ids"]
    harness.submit("two", [*prompt, *response, *long_prompt(5, 9)], **GREEDY)
    harness.finish()
    # The last token of a response is never passed to the model.
    assert harness.result("two")["usage"]["prompt_tokens_details"] == {"cached_tokens": 30 + 39}


def test_a_batch_that_raises_fails_only_its_own_requests():
    harness = SchedulerHarness(max_running=2)
    for name in "abc":
        harness.submit(name, max_new_tokens=4)
    harness.step()
    harness.worker.to_raise = RuntimeError("no memory left")
    harness.finish()
    for name in "ab":
        assert harness.failure(name) == StageFailure(
            name, "decode", "RuntimeError: no memory left", "server"
        )
    assert harness.result("c")["usage"]["completion_tokens"] == 4
    assert harness.scheduler.batch_queue.used_tokens == 0


def test_logits_that_are_not_finite_fail_the_request(monkeypatch):
    harness = SchedulerHarness()
    forward = harness.worker.forward
    monkeypatch.setattr(harness.worker, "forward", lambda parts: forward(parts) * float("nan"))
    harness.submit("a")
    harness.finish()
    assert "not finite" in harness.failure("a").error


def test_an_embedding_has_length_one_and_distinguishes_texts():
    harness = SchedulerHarness()
    harness.submit("a", "The sea is wide", task="embed")
    harness.submit("b", "The sea is wide", task="embed")
    harness.submit("c", "Anything else", task="embed")
    harness.finish()
    first, second, other = (harness.result(name)["embedding"] for name in "abc")
    assert sum(value * value for value in first) == pytest.approx(1.0)
    assert first == second != other
    tokens = tokens_of("The sea is wide")
    mean = tiny().model.hidden(tokens).mean(0)
    assert first == pytest.approx((mean / mean.norm()).tolist(), abs=1e-6)
    assert harness.result("a")["usage"]["total_tokens"] == len(tokens)


def test_an_embedding_that_raises_fails_only_its_request(monkeypatch):
    harness = SchedulerHarness()
    monkeypatch.setattr(harness.worker, "embed", lambda tokens: [][1])
    harness.submit("a", task="embed")
    harness.submit("b", max_new_tokens=2)
    harness.finish()
    assert harness.failure("a").kind == "server"
    assert harness.result("b")


def test_unsupported_messages_are_ignored():
    harness = SchedulerHarness()
    harness.scheduler.take(StreamChunk("a", "prepare", {}))
    harness.scheduler.take(ProfilerStart("run"))
    assert harness.emitted == []


def test_the_profiler_records_every_phase_of_a_request():
    harness = SchedulerHarness(prefill_chunk=8)
    events = []
    harness.scheduler.record = lambda *event: events.append(
        (len(harness.worker.batches), *event[:2])
    )
    harness.submit("a", long_prompt(20), max_new_tokens=3)
    harness.finish()
    assert events == [
        (0, "scheduler_request_build_start", "a"),
        (0, "scheduler_request_build_end", "a"),
        (0, "scheduler_queue_enter", "a"),
        (0, "scheduler_prefill_start", "a"),
        (3, "scheduler_prefill_end", "a"),
        (3, "scheduler_first_emit", "a"),
    ]


def test_gauges_are_reported_twice_a_second_while_busy():
    harness = SchedulerHarness(max_running=1, max_total_tokens=1000)
    harness.submit("a", long_prompt(20), max_new_tokens=40)
    harness.submit("b", long_prompt(20), max_new_tokens=40)
    for _ in range(10):
        harness.clock.now_s += 0.125
        harness.step()
    stats = [message.values for message in harness.emitted]
    assert len(stats) == 2
    assert stats[-1] == {
        "num_running_reqs": 1,
        "num_waiting_reqs": 1,
        "token_usage": 27 / 1000,
        "gen_throughput": 8.0,
        "cache_hit_rate": 0.0,
        "num_used_tokens": 27,
        "max_total_num_tokens": 1000,
        "prompt_tokens_total": 20,
        "generation_tokens_total": 8,
        "cached_tokens_total": 0,
        "aborted_total": 0,
        "paused": 0,
    }


def test_an_unexpected_error_fails_its_request_only():
    harness = SchedulerHarness()
    harness.submit("sane", **GREEDY)
    harness.submit("odd", stage_sampling=["no", "object"])
    harness.finish()
    (failure,) = harness.emitted_for(StageFailure, "odd")
    assert failure.kind == "server"
    assert harness.result("sane")["finish_reason"] == "length"


def test_a_too_long_prompt_is_refused_without_reading_its_tokens():
    class CountingList(list):
        reads = 0

        def __iter__(self):
            for token in super().__iter__():
                self.reads += 1
                yield token

    harness = SchedulerHarness(max_total_tokens=100)
    tokens = CountingList([7] * 5000)
    harness.submit("long", tokens)
    (failure,) = harness.emitted_for(StageFailure, "long")
    assert (failure.kind, "5000 tokens" in failure.error) == ("caller", True)
    assert tokens.reads == 0
