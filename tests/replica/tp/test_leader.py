import os

import pytest
import torch
import trio

from omni_proxy.replica.model_file import MODELS, cache_folder
from omni_proxy.replica.models import tiny
from omni_proxy.replica.models.text_model import load_text_model
from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from omni_proxy.replica.pipeline.messages import Result, ResultChunk, StageFailure
from omni_proxy.replica.text.stage import build
from tests.replica.api.api_fixture import opened
from tests.replica.text.scheduler_harness import Loop, long_prompt, submission, undisturbed
from tests.replica.weights.stage_fixture import checksum_of, running, save, weights_of

SMOLLM2 = cache_folder(os.environ) / MODELS["smollm2-135m"].file
needs_file = pytest.mark.skipif(
    not SMOLLM2.exists(), reason="omni-proxy replica fetch smollm2-135m"
)
PROMPTS = ("The sea", "A lamp in the window", long_prompt(90), "do", long_prompt(300, 9))
GREEDY = {"temperature": 0, "max_new_tokens": 12}


def alone(prompt, **more):
    """The text of one process."""
    return undisturbed(prompt, **GREEDY | more)


def compared_fields(result):
    return {key: result[key] for key in ("text", "token_ids", "finish_reason")}


@pytest.mark.parametrize("prompt", PROMPTS[:3], ids=["short", "words", "long"])
def test_a_text_is_that_of_one_process(pair, prompt):
    assert compared_fields(pair.generate(prompt=prompt)) == compared_fields(alone(prompt))


def test_texts_of_one_batch_are_those_of_one_process(pair):
    requests = [pair.submit(prompt=prompt) for prompt in PROMPTS]
    results = {}
    while len(results) < len(PROMPTS):
        reported = pair.next(Result)
        results[reported.request_id] = compared_fields(reported.data)
    for request_id, prompt in zip(requests, PROMPTS, strict=True):
        assert results[request_id] == compared_fields(alone(prompt))


def test_a_text_with_a_cached_beginning_is_that_of_one_process(pair):
    beginning = long_prompt(120, 3)
    pair.generate(prompt=beginning)
    for tail in ([300], [301, 302, 303], [300, 444]):
        result = pair.generate(prompt=[*beginning, *tail])
        assert result["usage"]["prompt_tokens_details"]["cached_tokens"] >= 120
        assert compared_fields(result) == compared_fields(alone([*beginning, *tail]))


def test_a_text_that_was_retracted_and_computed_again_is_that_of_one_process(pair):
    request_id = pair.submit(max_new_tokens=40, stream=True)
    pair.next(ResultChunk, lambda reported: reported.request_id == request_id)
    assert pair.admin("pause_generation", mode="retract").data["num_paused_requests"] == 1
    assert pair.admin("continue_generation").success
    assert compared_fields(pair.result(request_id)) == compared_fields(
        alone("The sea", max_new_tokens=40)
    )


def test_requests_that_outgrow_their_room_take_turns_and_end_alike():
    prompts = [long_prompt(100, first) for first in (1, 2)]
    with running(tp=2, threads=1, max_total_tokens=280) as stage:
        requests = [stage.submit(prompt=prompt, max_new_tokens=50) for prompt in prompts]
        results = {}
        while len(results) < 2:
            reported = stage.next(Result)
            results[reported.request_id] = compared_fields(reported.data)
    for request_id, prompt in zip(requests, prompts, strict=True):
        assert results[request_id] == compared_fields(alone(prompt, max_new_tokens=50))


def test_an_embedding_is_that_of_one_process(pair):
    pair.loop.inbox.put(submission("e", "The sea", "embed"))
    vector = pair.result("e")["embedding"]
    own = tiny.build(0).hidden(load_text_model("tiny").tokenizer.encode("The sea"))
    expected = torch.nn.functional.normalize(own.double().mean(0), dim=0)
    assert torch.allclose(torch.tensor(vector).double(), expected, atol=1e-4)


def test_a_request_that_is_refused_disturbs_no_rank(pair):
    pair.loop.inbox.put(submission("bad", [9_999]))
    assert "out of vocabulary" in pair.next(StageFailure).error
    assert compared_fields(pair.generate()) == compared_fields(alone("The sea"))


def test_a_batch_that_the_model_refuses_never_reaches_the_followers(pair):
    model = pair.scheduler.worker.text.model
    kv = model.new_kv()
    with pytest.raises(ValueError, match="has no token"):
        model([([], kv)])
    assert compared_fields(pair.generate()) == compared_fields(alone("The sea"))


def test_four_ranks_share_two_key_value_heads():
    with running(tp=4, threads=1) as stage:
        assert compared_fields(stage.generate()) == compared_fields(alone("The sea"))
        assert len(stage.admin("weights_checker").data["rank_results"]) == 4


def test_a_number_that_does_not_divide_the_model_is_refused():
    with pytest.raises(ValueError, match="over 1, 2 or 4 processes"):
        build("decode", model="tiny", tp=3)


def test_a_stage_over_no_process_is_refused():
    with pytest.raises(ValueError, match="tp must be at least 1, not 0"):
        build("decode", model="tiny", tp=0)


@pytest.mark.replica
@needs_file
def test_smollm2_over_three_processes_writes_what_one_writes():
    text = load_text_model("smollm2-135m")
    tokens = text.tokenizer.encode("The capital of France is")
    with Loop(build("decode", model="smollm2-135m", tp=3, threads=1)) as loop:
        loop.inbox.put(submission("r", tokens, **GREEDY | {"max_new_tokens": 5}))
        result = loop.next(Result).data
    kv, expected, pending = text.model.new_kv(), [], tokens
    for _ in range(5):
        pending = [int(text.model([(pending, kv)]).argmax())]
        expected += pending
    assert result["token_ids"] == expected
    assert "Paris" in result["text"]


async def test_the_ranks_are_seen_over_http_and_follow_an_update_or_refuse_it_together(tmp_path):
    with trio.fail_after(40):
        async with opened(builtin_pipeline(BuiltinOptions(model="tiny", tp=2))) as world:
            facts = await (await world.get("/server_info")).get_json()
            assert facts["tp_size"] == 2
            file = save(tmp_path / "new.safetensors", weights_of(7))
            body = {"model_path": str(file), "weight_version": "v7"}
            answer = await world.post("/update_weights_from_disk", body)
            assert answer.status_code == 200
            info = await (await world.get("/model_info")).get_json()
            assert info["weight_version"] == "v7"
            leader = next(each for each in info["results"] if each["stage"] == "decode")
            assert (leader["rank"], leader["role"], leader["data"]["tp_size"]) == (0, "leader", 2)
            checked = await (await world.get("/weights_checker")).get_json()
            leader = next(each for each in checked["results"] if each["stage"] == "decode")
            assert leader["data"]["full_checksum"] == checksum_of(weights_of(7))
            assert [each["role"] for each in leader["data"]["rank_results"]] == [
                "leader",
                "follower",
            ]

            body = {"model_path": str(tmp_path / "missing")}
            answer = await world.post("/update_weights_from_disk", body)
            assert answer.status_code == 400
            refused = (await answer.get_json())["detail"]["results"]
            leader = next(each for each in refused if each["stage"] == "decode")
            ranks = leader["data"]["rank_results"]
            assert [(each["rank"], each["success"]) for each in ranks] == [(0, False), (1, False)]
            assert "does not exist" in leader["message"]
