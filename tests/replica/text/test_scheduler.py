import msgspec
import pytest

from omni_proxy.replica.pipeline.messages import (
    ProfilerStart,
    Result,
    ResultChunk,
    StageFailure,
    StreamChunk,
)
from tests.replica.text.scheduler_harness import Desk, long_prompt, tiny, tokens_of, undisturbed

GREEDY = {"temperature": 0, "max_new_tokens": 40}


def test_a_stream_has_the_text_of_the_complete_response():
    desk = Desk()
    desk.submit("whole", **GREEDY)
    desk.submit("stream", stream=True, **GREEDY)
    desk.finish()
    whole = desk.result("whole")
    assert desk.streamed("stream") == desk.result("stream")["text"] == whole["text"]
    assert len(whole["text"]) > 60
    assert not desk.of(ResultChunk, "whole")
    chunks = desk.of(ResultChunk, "stream")
    assert [each.chunk_id for each in chunks] == list(range(len(chunks)))
    ids = [token for each in chunks for token in each.chunk["token_ids"]]
    assert ids == whole["token_ids"]


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
    desk = Desk()
    desk.submit("a", max_new_tokens=2)
    desk.clock.now_s = 2.5
    desk.finish()
    assert desk.result("a")["engine_time_s"] == 2.5


def test_there_is_one_log_probability_for_each_token():
    desk = Desk()
    desk.submit("a", stream=True, logprobs=True, **GREEDY)
    desk.finish()
    result = desk.result("a")
    rows = result["output_token_logprobs"]
    assert [token for _, token, _ in rows] == result["token_ids"]
    assert all(logprob < 0 and nothing is None for logprob, _, nothing in rows)
    streamed = [
        r for each in desk.of(ResultChunk, "a") for r in each.chunk["output_token_logprobs"]
    ]
    assert streamed == rows


def test_what_is_reported_survives_the_wire():
    desk = Desk()
    desk.submit("a", stream=True, logprobs=True, max_new_tokens=3)
    desk.finish()
    for message in desk.told:
        packed = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(packed, type=type(message)) == message


def test_a_stop_string_ends_the_text_and_is_never_shown():
    text = undisturbed(**GREEDY)["text"]
    stop = text[20:26]
    desk = Desk()
    desk.submit("a", stream=True, stop=["never there", stop], **GREEDY)
    desk.finish()
    result = desk.result("a")
    assert result["text"] == desk.streamed("a") == text[: text.index(stop)]
    assert (result["finish_reason"], result["stop_hit"]) == ("stop", stop)
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) < 40


def test_the_beginning_of_a_stop_string_is_released_at_the_end():
    text = undisturbed(**GREEDY)["text"]
    desk = Desk()
    desk.submit("a", stream=True, stop=text[-4:] + "###", **GREEDY)
    desk.finish()
    assert desk.streamed("a") == desk.result("a")["text"] == text
    assert desk.result("a")["finish_reason"] == "length"


def test_a_stop_token_ends_the_text_and_counts():
    whole = undisturbed(**GREEDY)
    place = 12
    token = whole["token_ids"][place]
    first = whole["token_ids"].index(token)
    result = undisturbed(stop_token_ids=[token], **GREEDY)
    assert result["token_ids"] == whole["token_ids"][: first + 1]
    assert result["text"] == tiny().tokenizer.decode(whole["token_ids"][:first])
    assert (result["finish_reason"], result["stop_hit"]) == ("stop", token)


def test_one_seed_gives_one_text_alone_or_in_a_crowd():
    wanted = {"seed": 42, "temperature": 1.3, "top_p": 0.9, "max_new_tokens": 60}
    alone = undisturbed("A song of", **wanted)["text"]
    desk = Desk()
    for number in range(15):
        desk.submit(f"other {number}", f"{number} " * number + "song", max_new_tokens=50 + number)
        desk.step()
    desk.submit("mine", "A song of", **wanted)
    desk.finish()
    assert desk.result("mine")["text"] == alone
    assert undisturbed("A song of", **{**wanted, "seed": 43})["text"] != alone


def test_sixteen_requests_in_one_batch_give_the_results_of_each_alone():
    prompts = [f"Chapter {number}: the sea" for number in range(16)]
    desk = Desk(prefill_chunk=1000)
    for number, prompt in enumerate(prompts):
        desk.submit(f"r{number}", prompt, stream=True, **GREEDY)
    desk.finish()
    assert [len(batch) for batch in desk.worker.batches] == [16] * 40
    for number, prompt in enumerate(prompts):
        assert desk.result(f"r{number}")["text"] == undisturbed(prompt, **GREEDY)["text"]


def test_more_than_may_run_wait_for_their_turn_in_order():
    desk = Desk(max_running=2)
    for number in range(5):
        desk.submit(f"r{number}", max_new_tokens=3)
    desk.finish()
    assert max(len(batch) for batch in desk.worker.batches) == 2
    assert [each.request_id for each in desk.told] == [f"r{number}" for number in range(5)]


def test_a_long_prompt_never_stalls_a_running_answer_for_more_than_a_chunk():
    desk = Desk(prefill_chunk=32)
    desk.submit("short", stream=True, temperature=0, max_new_tokens=60)
    desk.step()
    desk.submit("long", long_prompt(320), max_new_tokens=2)
    for step in range(1, 10):
        desk.step()
        assert len(desk.scheduler.batch_queue.find("short").tokens) == len(
            tokens_of("The sea")
        ) + 1 + (step)
        assert desk.worker.batches[-1] == [1, 32]
    desk.finish()
    assert desk.result("long")["usage"]["prompt_tokens"] == 320


def test_prefills_share_the_chunk_of_a_batch():
    desk = Desk(prefill_chunk=32)
    for name in "abc":
        desk.submit(name, long_prompt(20), max_new_tokens=2)
    desk.finish()
    # a whole and some of b; then a's answer, the rest of b and c; then the answers of b and c.
    assert desk.worker.batches == [[20, 12], [1, 8, 20], [1, 1]]


def test_a_chunked_prompt_gives_the_result_of_a_whole_one():
    prompt = long_prompt(150)
    desk = Desk(prefill_chunk=16)
    desk.submit("a", prompt, **GREEDY)
    desk.finish()
    assert desk.result("a")["text"] == undisturbed(prompt, **GREEDY)["text"]


def test_an_abort_frees_everything_before_the_next_step_and_nothing_more_is_reported():
    desk = Desk(cache_entries=4)
    desk.submit("gone", long_prompt(40), stream=True, max_new_tokens=100)
    desk.submit("stays", max_new_tokens=12)
    desk.step(5)
    told = len(desk.of(ResultChunk, "gone"))
    used = desk.scheduler.batch_queue.used_tokens
    assert told
    desk.abort("gone")
    assert desk.scheduler.batch_queue.used_tokens < used - 40
    desk.step()
    assert len(desk.worker.batches[-1]) == 1
    desk.finish()
    assert len(desk.of(ResultChunk, "gone")) == told
    assert not desk.of(Result, "gone")
    assert not desk.of(StageFailure, "gone")
    assert desk.result("stays")["usage"]["completion_tokens"] == 12
    desk.scheduler.emit_stats()
    assert desk.stats()["aborted_total"] == 1


def test_an_abort_reaches_waiting_requests_and_ignores_unknown_ones():
    desk = Desk(max_running=1)
    desk.submit("runs", max_new_tokens=3)
    desk.submit("waits", max_new_tokens=3)
    desk.submit("embeds", task="embed")
    for name in ("waits", "embeds", "unknown"):
        desk.abort(name)
    desk.finish()
    assert [each.request_id for each in desk.told] == ["runs"]


def test_running_out_of_tokens_makes_the_youngest_give_way_and_changes_no_text():
    desk = Desk(max_total_tokens=300, prefill_chunk=64)
    prompts = [long_prompt(30, number) for number in range(5)]
    for number, prompt in enumerate(prompts):
        desk.submit(f"r{number}", prompt, stream=True, temperature=0, max_new_tokens=90)
    begun, held = {}, []
    while desk.scheduler.busy:
        desk.step()
        held.append(desk.scheduler.batch_queue.used_tokens)
        begun |= {each.request_id: each.begun for each in desk.scheduler.batch_queue}
    assert max(held) <= 300
    assert begun["r0"] == 1
    assert max(begun.values()) > 1  # or no request was retracted
    for number, prompt in enumerate(prompts):
        alone = undisturbed(prompt, temperature=0, max_new_tokens=90)["text"]
        assert desk.result(f"r{number}")["text"] == desk.streamed(f"r{number}") == alone


def test_a_known_beginning_is_not_computed_again_and_changes_no_text():
    prompt = long_prompt(120)
    desk = Desk(cache_entries=4)
    desk.submit("cold", prompt, **GREEDY)
    desk.finish()
    before = len(desk.worker.batches)
    desk.submit("warm", [*prompt[:100], *long_prompt(10, 77)], **GREEDY)
    desk.finish()
    assert desk.worker.batches[before] == [10]
    usage = desk.result("warm")["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 100}
    alone = undisturbed([*prompt[:100], *long_prompt(10, 77)], **GREEDY)
    assert desk.result("warm")["text"] == alone["text"]
    desk.submit("same", prompt, **GREEDY)
    desk.finish()
    assert desk.result("same")["usage"]["prompt_tokens_details"] == {"cached_tokens": 119}
    assert desk.result("same")["text"] == desk.result("cold")["text"]


def test_an_answer_continues_from_the_turn_before():
    prompt = long_prompt(30)
    desk = Desk(cache_entries=4)
    desk.submit("one", prompt, **GREEDY)
    desk.finish()
    answer = desk.result("one")["token_ids"]
    desk.submit("two", [*prompt, *answer, *long_prompt(5, 9)], **GREEDY)
    desk.finish()
    # The last token of a response was never passed to the model.
    assert desk.result("two")["usage"]["prompt_tokens_details"] == {"cached_tokens": 30 + 39}


def test_a_batch_that_raises_fails_its_own_requests_and_the_next_ones_are_computed():
    desk = Desk(max_running=2)
    for name in "abc":
        desk.submit(name, max_new_tokens=4)
    desk.step()
    desk.worker.to_raise = RuntimeError("no memory left")
    desk.finish()
    for name in "ab":
        assert desk.failure(name) == StageFailure(
            name, "decode", "RuntimeError: no memory left", "server"
        )
    assert desk.result("c")["usage"]["completion_tokens"] == 4
    assert desk.scheduler.batch_queue.used_tokens == 0


def test_logits_that_are_no_numbers_fail_the_request(monkeypatch):
    desk = Desk()
    forward = desk.worker.forward
    monkeypatch.setattr(desk.worker, "forward", lambda parts: forward(parts) * float("nan"))
    desk.submit("a")
    desk.finish()
    assert "not finite" in desk.failure("a").error


def test_an_embedding_has_length_one_and_distinguishes_texts():
    desk = Desk()
    desk.submit("a", "The sea is wide", task="embed")
    desk.submit("b", "The sea is wide", task="embed")
    desk.submit("c", "Anything else", task="embed")
    desk.finish()
    first, again, other = (desk.result(name)["embedding"] for name in "abc")
    assert sum(each * each for each in first) == pytest.approx(1.0)
    assert first == again != other
    tokens = tokens_of("The sea is wide")
    mean = tiny().model.hidden(tokens).mean(0)
    assert first == pytest.approx((mean / mean.norm()).tolist(), abs=1e-6)
    assert desk.result("a")["usage"]["total_tokens"] == len(tokens)


def test_an_embedding_that_raises_fails_alone(monkeypatch):
    desk = Desk()
    monkeypatch.setattr(desk.worker, "embed", lambda tokens: [][1])
    desk.submit("a", task="embed")
    desk.submit("b", max_new_tokens=2)
    desk.finish()
    assert desk.failure("a").kind == "server"
    assert desk.result("b")


def test_messages_that_are_not_for_it_are_ignored():
    desk = Desk()
    desk.scheduler.take(StreamChunk("a", "prepare", {}))
    desk.scheduler.take(ProfilerStart("run"))
    assert desk.told == []


def test_the_profiler_records_every_step_of_a_request():
    desk = Desk(prefill_chunk=8)
    heard = []
    desk.scheduler.record = lambda *event: heard.append((len(desk.worker.batches), *event[:2]))
    desk.submit("a", long_prompt(20), max_new_tokens=3)
    desk.finish()
    assert heard == [
        (0, "scheduler_request_build_start", "a"),
        (0, "scheduler_request_build_end", "a"),
        (0, "scheduler_queue_enter", "a"),
        (0, "scheduler_prefill_start", "a"),
        (3, "scheduler_prefill_end", "a"),
        (3, "scheduler_first_emit", "a"),
    ]


def test_gauges_are_reported_twice_a_second_while_busy():
    desk = Desk(max_running=1, max_total_tokens=1000)
    desk.submit("a", long_prompt(20), max_new_tokens=40)
    desk.submit("b", long_prompt(20), max_new_tokens=40)
    for _ in range(10):
        desk.clock.now_s += 0.125
        desk.step()
    stats = [each.values for each in desk.told]
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
    desk = Desk()
    desk.submit("sane", **GREEDY)
    desk.submit("odd", stage_sampling=["no", "object"])
    desk.finish()
    (failed,) = desk.of(StageFailure, "odd")
    assert failed.kind == "server"
    assert desk.result("sane")["finish_reason"] == "length"


def test_a_prompt_that_is_too_long_is_not_looked_through():
    class Seen(list):
        looked = 0

        def __iter__(self):
            for token in super().__iter__():
                self.looked += 1
                yield token

    desk = Desk(max_total_tokens=100)
    tokens = Seen([7] * 5000)
    desk.submit("long", tokens)
    (failed,) = desk.of(StageFailure, "long")
    assert (failed.kind, "5000 tokens" in failed.error) == ("caller", True)
    assert tokens.looked == 0
