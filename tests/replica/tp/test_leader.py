import os

import pytest
import torch
import trio

from omni_proxy.replica.model_file import MODELS, cache_folder
from omni_proxy.replica.models import tiny
from omni_proxy.replica.models.text_model import load_text_model
from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from omni_proxy.replica.pipeline.stage_messages import Result, ResultChunk, StageFailure
from omni_proxy.replica.stages.text import build
from tests.replica.api.api_fixture import opened
from tests.replica.text.scheduler_harness import Loop, long_prompt, submission, undisturbed
from tests.replica.weights.stage_fixture import checksum_of, running, save, weights_of

SMOLLM2 = cache_folder(os.environ) / MODELS["smollm2-135m"].file
needs_file = pytest.mark.skipif(
    not SMOLLM2.exists(), reason="omni-proxy replica fetch smollm2-135m"
)
PROMPTS = ("The sea", "A lamp in the window", long_prompt(90), "do", long_prompt(300, 9))
GREEDY = {"temperature": 0, "max_new_tokens": 12}


def single_process_result(prompt, **params):
    """The result of a single process."""
    return undisturbed(prompt, **GREEDY | params)


def compared_fields(result):
    return {key: result[key] for key in ("text", "token_ids", "finish_reason")}


@pytest.mark.parametrize("prompt", PROMPTS[:3], ids=["short", "words", "long"])
def test_a_text_equals_that_of_one_process(pair, prompt):
    assert compared_fields(pair.generate(prompt=prompt)) == compared_fields(
        single_process_result(prompt)
    )


def test_texts_of_one_batch_equal_those_of_one_process(pair):
    requests = [pair.submit(prompt=prompt) for prompt in PROMPTS]
    results = {}
    while len(results) < len(PROMPTS):
        message = pair.next(Result)
        results[message.request_id] = compared_fields(message.data)
    for request_id, prompt in zip(requests, PROMPTS, strict=True):
        assert results[request_id] == compared_fields(single_process_result(prompt))


def test_a_text_with_a_cached_prefix_equals_that_of_one_process(pair):
    beginning = long_prompt(120, 3)
    pair.generate(prompt=beginning)
    for tail in ([300], [301, 302, 303], [300, 444]):
        result = pair.generate(prompt=[*beginning, *tail])
        assert result["usage"]["prompt_tokens_details"]["cached_tokens"] >= 120
        assert compared_fields(result) == compared_fields(
            single_process_result([*beginning, *tail])
        )


def test_a_retracted_text_equals_that_of_one_process(pair):
    request_id = pair.submit(max_new_tokens=40, stream=True)
    pair.next(ResultChunk, lambda message: message.request_id == request_id)
    assert pair.admin("pause_generation", mode="retract").data["num_paused_requests"] == 1
    assert pair.admin("continue_generation").success
    assert compared_fields(pair.result(request_id)) == compared_fields(
        single_process_result("The sea", max_new_tokens=40)
    )


def test_requests_that_exceed_the_kv_memory_take_turns_with_the_same_texts():
    prompts = [long_prompt(100, first) for first in (1, 2)]
    with running(tp=2, threads=1, max_total_tokens=280) as stage:
        requests = [stage.submit(prompt=prompt, max_new_tokens=50) for prompt in prompts]
        results = {}
        while len(results) < 2:
            message = stage.next(Result)
            results[message.request_id] = compared_fields(message.data)
    for request_id, prompt in zip(requests, prompts, strict=True):
        assert results[request_id] == compared_fields(
            single_process_result(prompt, max_new_tokens=50)
        )


def test_an_embedding_equals_that_of_one_process(pair):
    pair.loop.inbox.put(submission("e", "The sea", "embed"))
    vector = pair.result("e")["embedding"]
    hidden = tiny.build(0).hidden(load_text_model("tiny").tokenizer.encode("The sea"))
    expected = torch.nn.functional.normalize(hidden.double().mean(0), dim=0)
    assert torch.allclose(torch.tensor(vector).double(), expected, atol=1e-4)


def test_a_refused_request_affects_no_rank(pair):
    pair.loop.inbox.put(submission("bad", [9_999]))
    assert "out of vocabulary" in pair.next(StageFailure).error
    assert compared_fields(pair.generate()) == compared_fields(single_process_result("The sea"))


def test_a_batch_that_the_model_refuses_never_reaches_the_followers(pair):
    model = pair.scheduler.worker.text.model
    kv = model.new_kv()
    with pytest.raises(ValueError, match="has no token"):
        model([([], kv)])
    assert compared_fields(pair.generate()) == compared_fields(single_process_result("The sea"))


def test_four_ranks_share_two_key_value_heads():
    with running(tp=4, threads=1) as stage:
        assert compared_fields(stage.generate()) == compared_fields(
            single_process_result("The sea")
        )
        assert len(stage.admin("weights_checker").data["rank_results"]) == 4


def test_a_tp_size_that_does_not_divide_the_model_is_refused():
    with pytest.raises(ValueError, match="over 1, 2 or 4 processes"):
        build("decode", model="tiny", tp=3)


def test_a_tp_size_of_0_is_refused():
    with pytest.raises(ValueError, match="tp must be at least 1, not 0"):
        build("decode", model="tiny", tp=0)


@pytest.mark.replica
@needs_file
def test_smollm2_over_three_processes_generates_the_tokens_of_one():
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


async def test_all_ranks_take_or_refuse_an_update_over_http_together(tmp_path):
    with trio.fail_after(40):
        async with opened(builtin_pipeline(BuiltinOptions(model="tiny", tp=2))) as api:
            facts = await (await api.get("/server_info")).get_json()
            assert facts["tp_size"] == 2
            file = save(tmp_path / "new.safetensors", weights_of(7))
            body = {"model_path": str(file), "weight_version": "v7"}
            response = await api.post("/update_weights_from_disk", body)
            assert response.status_code == 200
            info = await (await api.get("/model_info")).get_json()
            assert info["weight_version"] == "v7"
            leader = next(entry for entry in info["results"] if entry["stage"] == "decode")
            assert (leader["rank"], leader["role"], leader["data"]["tp_size"]) == (0, "leader", 2)
            checker = await (await api.get("/weights_checker")).get_json()
            leader = next(entry for entry in checker["results"] if entry["stage"] == "decode")
            assert leader["data"]["full_checksum"] == checksum_of(weights_of(7))
            assert [entry["role"] for entry in leader["data"]["rank_results"]] == [
                "leader",
                "follower",
            ]

            body = {"model_path": str(tmp_path / "missing")}
            response = await api.post("/update_weights_from_disk", body)
            assert response.status_code == 400
            results = (await response.get_json())["detail"]["results"]
            leader = next(entry for entry in results if entry["stage"] == "decode")
            ranks = leader["data"]["rank_results"]
            assert [(entry["rank"], entry["success"]) for entry in ranks] == [
                (0, False),
                (1, False),
            ]
            assert "does not exist" in leader["message"]
