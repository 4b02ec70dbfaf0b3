"""A prefill and a decode stage together, compared with one stage that serves whole requests."""

import json

import pytest

from omni_proxy.replica.kv_transfer.request_fields import PARAMS, Serve
from omni_proxy.replica.pipeline.stage_messages import Result
from tests.replica.text.transfer_stages import GREEDY, Pair, long_prompt, stage

SCHEMA = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}})
COMPARED = ("text", "token_ids", "output_token_logprobs", "finish_reason", "stop_hit", "usage")


@pytest.fixture(scope="module")
def pair():
    """Stages without a prefix cache, so tests can share them."""
    with stage("prefill") as prefill, stage("decode") as decode, stage() as whole:
        yield Pair(prefill, decode, whole)


def compared_fields(data):
    return {name: data.get(name) for name in COMPARED}


@pytest.mark.parametrize("form", ["by_handle", "by_room"])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        {"temperature": 0.9, "seed": 5, "max_new_tokens": 24, "logprobs": True, "top_p": 0.9},
        {"temperature": 0.0, "max_new_tokens": 24, "repetition_penalty": 1.3, "stop": ["an"]},
        {"temperature": 0.0, "max_new_tokens": 24, "json_schema": SCHEMA},
        {"temperature": 0.0, "max_new_tokens": 1},
    ],
    ids=["greedy", "seeded", "penalised", "constrained", "one-token"],
)
def test_the_result_equals_that_of_one_replica(pair, form, params):
    for prompt in (long_prompt(3, 1), long_prompt(700, 2)):
        assert compared_fields(getattr(pair, form)(prompt, **params)) == compared_fields(
            pair.whole.ask(prompt, **params)
        )


@pytest.mark.parametrize("form", ["by_handle", "by_room"])
def test_the_stream_equals_that_of_one_replica(pair, form):
    prompt, params = long_prompt(90, 3), GREEDY | {"stream": True}
    if form == "by_handle":
        fetch = pair.kept(prompt, **GREEDY)
    else:
        serve, fetch = pair.room()
        pair.prefill.submit(prompt, serve, **params)
    chunks = pair.decode.streamed(pair.decode.submit(prompt, fetch, **params))
    expected = pair.whole.streamed(pair.whole.submit(prompt, **params))
    assert list(map(compared_fields, chunks)) == list(map(compared_fields, expected))
    assert len(chunks) > 2


def test_requests_of_one_batch_do_not_affect_each_other(pair):
    prompts = [long_prompt(20 + 60 * index, 10 + index) for index in range(8)]
    rooms = [pair.room() for _ in prompts]
    # For half of them, decode is submitted before prefill, and in another order.
    legs = [
        (pair.prefill, prompt, serve) for prompt, (serve, _) in zip(prompts, rooms, strict=True)
    ]
    legs += [
        (pair.decode, prompt, fetch) for prompt, (_, fetch) in zip(prompts, rooms, strict=True)
    ]
    ids = {
        (target is pair.decode, tuple(prompt)): target.submit(prompt, spec, **GREEDY)
        for target, prompt, spec in legs[::3] + legs[1::3] + legs[2::3]
    }
    for prompt in prompts:
        result = pair.decode.end(ids[True, tuple(prompt)]).data
        assert result["token_ids"] == pair.whole.ask(prompt, **GREEDY)["token_ids"]


def test_cached_tokens_are_those_that_prefill_had_cached():
    prompt = long_prompt(300, 4)
    with stage("prefill", cache=4) as prefill, stage("decode") as decode, stage(cache=4) as whole:
        cached = Pair(prefill, decode, whole)
        for form in (cached.by_handle, cached.by_room, cached.by_handle):
            result, expected = form(prompt, **GREEDY), whole.ask(prompt, **GREEDY)
            assert result["usage"] == expected["usage"]
            assert result["token_ids"] == expected["token_ids"]
        assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == 299


def test_a_fetched_kv_is_added_to_the_prefix_cache_of_decode():
    prompt = long_prompt(200, 5)
    with stage("prefill") as prefill, stage("decode", cache=4) as decode, stage() as whole:
        Pair(prefill, decode, whole).by_handle(prompt, **GREEDY)
        later = decode.ask(prompt, **GREEDY)
        assert later["usage"]["prompt_tokens_details"]["cached_tokens"] == 199
        assert later["token_ids"] == whole.ask(prompt, **GREEDY)["token_ids"]


def test_the_choices_of_one_request_share_a_transfer(pair):
    prompt = long_prompt(150, 6)
    fetch = pair.kept(prompt)
    params = [{"temperature": 1.0, "seed": seed, "max_new_tokens": 12} for seed in (1, 2, 3)]
    ids = [pair.decode.submit(prompt, fetch, **choice) for choice in params]
    for request_id, choice in zip(ids, params, strict=True):
        result = pair.decode.end(request_id)
        assert compared_fields(result.data) == compared_fields(pair.whole.ask(prompt, **choice))


def test_requests_without_a_transfer_are_served_by_both(pair):
    prompt = long_prompt(40, 7)
    expected = compared_fields(pair.whole.ask(prompt, **GREEDY))
    assert compared_fields(pair.prefill.ask(prompt, **GREEDY)) == expected
    assert compared_fields(pair.decode.ask(prompt, **GREEDY)) == expected


def test_a_retracted_request_computes_its_prompt_again(pair):
    prompt = long_prompt(100, 8)
    fetch, params = pair.kept(prompt), {"temperature": 0.0, "max_new_tokens": 300, "stream": True}
    request_id = pair.decode.submit(prompt, fetch, **params)
    pair.decode.next(object, lambda message: getattr(message, "request_id", "") == request_id)
    pair.decode.admin("pause_generation", mode="retract")
    pair.decode.admin("continue_generation")
    result = pair.decode.end(request_id).data
    assert result["token_ids"] == pair.whole.ask(prompt, **params)["token_ids"]


def test_a_kv_is_fetched_once(pair):
    prompt = long_prompt(60, 9)
    fetch = pair.kept(prompt)
    pair.decode.ask(prompt, fetch)
    failure = pair.decode.fail(prompt, fetch)
    assert failure.kind == "server"
    assert failure.error.startswith("KVTransferError: ")
    assert "fetched already" in failure.error


def test_of_two_requests_with_one_handle_one_is_served(pair):
    prompt = long_prompt(60, 11)
    fetch = pair.kept(prompt)
    other = type(fetch)(fetch.host, fetch.port, fetch.key, fetch.engine_id, "another request")
    ids = [pair.decode.submit(prompt, each, **GREEDY) for each in (fetch, other)]
    outcomes = [pair.decode.end(each) for each in ids]
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Result", "StageFailure"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": "kept:nobody"}, "the key is unknown"),
        ({"engine_id": "0" * 32}, "restarted since"),
        ({"host": "192.0.2.1"}, "--kv-peers"),
        ({"host": "host.invalid"}, "resolved"),
        ({"port": 1}, "refused"),
    ],
)
def test_an_unavailable_kv_is_an_error_with_the_reason(pair, changes, reason):
    prompt = long_prompt(60, 12)
    fetch = pair.kept(prompt)
    fields = {name: getattr(fetch, name) for name in fetch.__struct_fields__} | changes
    failure = pair.decode.fail(prompt, type(fetch)(**fields))
    assert failure.error.startswith("KVTransferError: ")
    assert reason in failure.error


def test_a_kv_is_for_its_own_prompt_only(pair):
    prompt = long_prompt(60, 13)
    failure = pair.decode.fail([*prompt[:-1], prompt[-1] ^ 1], pair.kept(prompt))
    assert "another prompt" in failure.error
    serve, fetch = pair.room()
    first = pair.prefill.submit(prompt, serve)
    assert "another prompt" in pair.decode.fail(prompt[:-1], fetch).error
    assert "KVTransferError" in pair.prefill.end(first).error


def test_a_room_is_for_one_pair_at_a_time(pair):
    prompt = long_prompt(60, 14)
    serve, fetch = pair.room()
    first = pair.prefill.submit(prompt, serve)
    refused = pair.prefill.fail(prompt, serve)
    assert refused.kind == "caller"
    assert "is in use" in refused.error
    pair.decode.ask(prompt, fetch)
    assert isinstance(pair.prefill.end(first), Result)
    assert pair.prefill.facts()["waiting"] == 0


def test_two_decode_requests_of_one_room_are_refused_at_decode_and_at_prefill(pair):
    prompt = long_prompt(60, 15)
    serve, fetch = pair.room()
    rooms = pair.prefill.scheduler._transfers._server._rendezvous
    with stage("decode") as other:
        first = pair.decode.submit(prompt, fetch)
        assert "is in use" in pair.decode.fail(prompt, fetch).error
        # The first of both to connect has the room.
        pair.decode.until(lambda _: fetch.key in rooms and rooms[fetch.key].connected)
        assert "is in use" in other.fail(prompt, fetch).error
        pair.prefill.submit(prompt, serve)
        assert isinstance(pair.decode.end(first), Result)


def test_prefill_computes_nothing_before_decode_fetches(pair):
    prompt = long_prompt(60, 16)
    serve, fetch = pair.room()
    first = pair.prefill.submit(prompt, serve)
    assert pair.prefill.facts()["waiting"] == 1
    pair.prefill.ask(long_prompt(5))  # a batch that could have included the room
    assert pair.prefill.facts()["waiting"] == 1
    pair.decode.ask(prompt, fetch)
    assert pair.prefill.end(first).data["finish_reason"] == "length"


def test_a_leg_whose_other_leg_never_connects_fails_after_the_timeout(pair):
    prompt = long_prompt(60, 17)
    with stage("prefill", wait_secs=0.05) as prefill, stage("decode") as decode:
        legs = Pair(prefill, decode, None)
        serve, fetch = legs.room()
        assert "no decode replica connected" in prefill.fail(prompt, serve).error
        assert "no prefill request for it" in decode.fail(prompt, fetch).error
        assert prefill.ask(prompt)["text"]  # it still serves


def test_aborting_the_prefill_leg_ends_the_decode_leg_at_once(pair):
    prompt = long_prompt(60, 18)
    serve, fetch = pair.room()
    pair.prefill.admin("pause_generation", mode="in_place")
    first, second = pair.prefill.submit(prompt, serve), pair.decode.submit(prompt, fetch)
    pair.prefill.until(lambda facts: facts["waiting"] == 0)  # decode has connected
    pair.prefill.abort(first)
    assert "aborted" in pair.decode.end(second).error
    pair.prefill.admin("continue_generation")


def test_aborting_the_decode_leg_ends_the_prefill_leg_at_once(pair):
    prompt = long_prompt(60, 19)
    serve, fetch = pair.room()
    pair.prefill.admin("pause_generation", mode="in_place")
    first, second = pair.prefill.submit(prompt, serve), pair.decode.submit(prompt, fetch)
    pair.prefill.until(lambda facts: facts["waiting"] == 0)
    pair.decode.abort(second)
    assert "decode replica disconnected" in pair.prefill.end(first).error
    assert pair.decode.facts()["fetching"] == 0
    pair.prefill.admin("continue_generation")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_waiting_leg_can_be_ended_early_without_tokens(pair, side):
    serve, fetch = pair.room()
    leg = getattr(pair, side)
    request_id = leg.submit(long_prompt(60, 20), serve if side == "prefill" else fetch)
    leg.end_early(request_id)
    result = leg.end(request_id).data
    assert (result["finish_reason"], result["token_ids"]) == ("abort", [])


def test_dropping_all_requests_ends_their_transfers(pair):
    prompt = long_prompt(60, 21)
    _, fetch = pair.room()
    second = pair.decode.submit(prompt, fetch)
    pair.decode.until(lambda facts: facts["fetching"] == 1)
    assert pair.decode.admin("pause_generation", mode="abort").data["num_paused_requests"] == 1
    assert pair.decode.end(second).kind == "dropped"
    pair.decode.admin("continue_generation")
    assert pair.decode.facts()["fetching"] == 0
    assert compared_fields(pair.by_room(prompt, **GREEDY)) == compared_fields(
        pair.whole.ask(prompt, **GREEDY)
    )


@pytest.mark.parametrize("update", ["update_weights_from_disk", "reset_weights"])
def test_a_kv_is_dropped_with_the_weights_that_computed_it(update):
    prompt = long_prompt(60, 22)
    with stage("prefill") as prefill, stage("decode") as decode:
        pair = Pair(prefill, decode, None)
        fetch = pair.kept(prompt)
        assert prefill.facts()["kept"] == 1
        assert prefill.admin(update, model_path="tiny").success
        assert prefill.facts()["kept"] == 0
        assert "weights have changed" in decode.fail(prompt, fetch).error


def test_kvs_are_dropped_when_the_weights_are_damaged():
    with stage("prefill") as prefill:
        prefill.ask(long_prompt(60), Serve(), max_new_tokens=1)
        prefill.scheduler.register_admin(
            "damage", lambda _: (True, "ok", {"done": prefill.scheduler.weights_damaged()}, None)
        )
        prefill.admin("damage")
        assert prefill.facts()["kept"] == 0


def test_decode_refuses_the_kv_of_other_weights_with_the_same_version(pair):
    prompt = long_prompt(60, 23)
    with stage("decode", seed=1) as other:
        failure = other.fail(prompt, pair.kept(prompt))
        assert "although both are called 'default'" in failure.error
        serve, fetch = pair.room()
        first = pair.prefill.submit(prompt, serve)
        assert "although both" in other.fail(prompt, fetch).error
        assert "KVTransferError" in pair.prefill.end(first).error


def test_decode_refuses_the_kv_of_another_version():
    prompt = long_prompt(60, 24)
    with stage("prefill") as prefill, stage("decode") as decode:
        pair = Pair(prefill, decode, None)
        fetch = pair.kept(prompt)
        decode.admin("update_weight_version", new_version="v2")
        assert "'default' at prefill, 'v2' at decode" in decode.fail(prompt, fetch).error
        prefill.admin("update_weight_version", new_version="v2")
        assert pair.by_handle(prompt)["weight_version"] == "v2"


def test_a_fetched_kv_is_not_used_after_the_weights_changed():
    prompt, params = long_prompt(60, 25), {"temperature": 0.0, "max_new_tokens": 8}
    with stage("prefill") as prefill, stage("decode") as decode:
        pair = Pair(prefill, decode, None)
        fetch = pair.kept(prompt)
        decode.admin("pause_generation", mode="in_place")
        request_id = decode.submit(prompt, fetch, **params)
        decode.until(lambda facts: facts["fetching"] == 0)  # fetched, not used yet
        decode.admin("pause_generation", mode="retract")
        assert decode.admin("reset_weights").success
        decode.admin("continue_generation")
        result = decode.end(request_id).data
        assert result["token_ids"] == decode.ask(prompt, **params)["token_ids"]


def test_a_kept_kv_is_freed_when_its_lease_ends():
    prompt = long_prompt(60, 26)
    with stage("prefill", lease_secs=0.05) as prefill, stage("decode") as decode:
        fetch = Pair(prefill, decode, None).kept(prompt)
        assert prefill.until(lambda facts: facts["kept"] == 0)["kept_bytes"] == 0
        assert "it was not fetched within 0.05 s" in decode.fail(prompt, fetch).error


def test_a_kept_kv_is_freed_by_the_id_of_its_request(pair):
    prompt = long_prompt(60, 27)
    pair.prefill.admin("release_kv", all=True)
    for payload in ({"ids": ["kept-by-id"]}, {"prefix": "kept-"}, {"all": True}):
        result = pair.prefill.ask(prompt, Serve(), request_id="kept-by-id", max_new_tokens=1)
        assert pair.prefill.admin("release_kv", ids=["another"]).data == {"released": 0}
        assert pair.prefill.admin("release_kv", **payload).data == {"released": 1}
        failure = pair.decode.fail(prompt, pair.fetch_of(result[PARAMS]))
        assert "its request was aborted" in failure.error


def test_the_result_names_no_kv_if_memory_is_full():
    with stage("prefill", max_bytes=200_000) as prefill:
        assert PARAMS in prefill.ask(long_prompt(60), Serve(), max_new_tokens=1)
        assert PARAMS not in prefill.ask(long_prompt(60), Serve(), max_new_tokens=1)


def test_decode_refuses_a_kv_that_exceeds_its_memory_limit(pair):
    prompt = long_prompt(60, 28)
    with stage("decode", max_bytes=1000) as small:
        assert "--kv-max-bytes" in small.fail(prompt, pair.kept(prompt)).error


def test_a_stream_names_no_kv_and_keeps_none(pair):
    request_id = pair.prefill.submit(long_prompt(60, 29), Serve(), max_new_tokens=1, stream=True)
    assert PARAMS not in pair.prefill.streamed(request_id)[-1]


def test_a_kv_is_kept_for_a_request_of_one_token_only(pair):
    failure = pair.prefill.fail(long_prompt(60, 30), Serve(), max_new_tokens=2)
    assert failure.kind == "caller"
    assert "limit of one token" in failure.error


@pytest.mark.parametrize("decode_first", [False, True])
def test_mooncake_legs_may_start_in_either_order(pair, decode_first):
    prompt = long_prompt(80, 31)
    serve = Serve(f"transfer:{decode_first}")
    host, port = pair.prefill.address["host"], pair.prefill.address["port"]
    engine = pair.prefill.address["engine_id"]
    fetch = type(pair.room()[1])(host, port, serve.key, engine, serve.key)
    if decode_first:
        second = pair.decode.submit(prompt, fetch, **GREEDY)
        pair.decode.until(lambda facts: facts["fetching"] == 1)
        pair.prefill.ask(prompt, serve, **GREEDY | {"max_new_tokens": 1})
    else:
        pair.prefill.ask(prompt, serve, **GREEDY | {"max_new_tokens": 1})
        second = pair.decode.submit(prompt, fetch, **GREEDY)
    assert compared_fields(pair.decode.end(second).data) == compared_fields(
        pair.whole.ask(prompt, **GREEDY)
    )
    assert "fetched already" in pair.decode.fail(prompt, fetch).error
