import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.json_splice import JsonText
from omni_proxy.routing.kv_connectors.mooncake import (
    EngineIds,
    bootstrap_address,
    mooncake_legs,
    read_engine_ids,
)
from omni_proxy.routing.kv_connectors.nixl import (
    REMOTE_DECODE,
    decode_edits,
    prefill_edits,
    read_params,
)
from tests.fleet.entries import entry, fleet_of

LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens", "min_completion_tokens")
bodies = st.dictionaries(
    st.sampled_from([*LIMITS, "stream", "stream_options", "kv_transfer_params", "messages", "n"]),
    st.none() | st.booleans() | st.integers() | st.dictionaries(st.text(max_size=3), st.integers()),
)


@given(bodies)
def test_prefill_computes_one_token_without_a_stream(body):
    text = JsonText(json.dumps(body).encode())
    sent = json.loads(text.splice(prefill_edits("/v1/chat/completions", text)))
    dropped = {"stream_options", "min_tokens", "min_completion_tokens"}
    expected = {key: value for key, value in body.items() if key not in dropped}
    expected |= {"max_tokens": 1, "stream": False, "kv_transfer_params": json.loads(REMOTE_DECODE)}
    if "max_completion_tokens" in body:
        expected["max_completion_tokens"] = 1
    assert sent == expected


@given(bodies, st.none() | st.dictionaries(st.text(max_size=3), st.integers(), min_size=1))
def test_decode_gets_the_limits_of_the_client_and_the_params_of_prefill(body, params):
    response = json.dumps({"id": 1} | ({} if params is None else {"kv_transfer_params": params}))
    prefill_params = read_params(response.encode())
    text = JsonText(json.dumps(body).encode())
    sent = json.loads(text.splice(decode_edits(prefill_params)))
    expected = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    assert sent == expected | ({} if params is None else {"kv_transfer_params": params})


def test_the_transfer_params_are_copied_byte_for_byte():
    params = b'{ "tp_size":1.0, "remote_block_ids" : [[1,\t2]],"x":"\\u00e9" }'
    assert read_params(b'{"a":1,"kv_transfer_params": %b}' % params) == params


def test_transfer_params_are_read_from_nonstandard_json():
    assert read_params(b'{"a":NaN,"kv_transfer_params": {"b":1}}') == b'{"b":1}'
    assert (
        read_params(b'{"kv_transfer_params": {"b":1}, "kv_transfer_params": {"b":2}}') == b'{"b":2}'
    )


@pytest.mark.parametrize("response", [b"", b"[]", b"{", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{}}', b'{"kv_transfer_params":[]}'])  # fmt: skip
def test_a_response_without_transfer_params_has_none(response):
    assert read_params(response) is None


def test_both_mooncake_legs_have_the_same_transfer_id():
    text = JsonText(b'{"messages":[]}')
    legs = mooncake_legs(
        "/v1/chat/completions", text, "http://h:8998", "e", lambda bound: bound - 1
    )
    prefill = json.loads(text.splice(legs.prefill))["kv_transfer_params"]
    decode = json.loads(text.splice(legs.decode))["kv_transfer_params"]
    assert (
        prefill["transfer_id"]
        == decode["transfer_id"]
        == "xfer-ffffffff-ffff-ffff-ffff-fffffffffffe"
    )
    assert (decode["remote_bootstrap_addr"], decode["remote_engine_id"]) == ("http://h:8998", "e")


@pytest.mark.parametrize(
    ("response", "rank", "engine_id"),
    [
        (b'{"0": {"engine_id": "a"}, "1": {"engine_id": "b"}}', 1, "b"),
        (b'{"0": {"engine_id": "a"}}', 0, "a"), (b'{"0": {"engine_id": "a"}}', 1, None),
        (b'{"0": {"engine_id": 7}}', 0, None), (b'{"0": 7}', 0, None), (b"[]", 0, None),
        (b"<html>", 0, None), (b"\xff", 0, None), (b"[" * 100_000, 0, None),
    ],
)  # fmt: skip
def test_the_engine_id_is_that_of_the_rank(response, rank, engine_id):
    assert read_engine_ids(response).get(rank) == engine_id


def test_an_engine_id_is_forgotten_when_the_engine_restarts():
    (worker,) = fleet_of(entry("w")).workers
    known = EngineIds()
    assert known.find(worker) is None
    known.keep(worker, {0: "a"})
    assert known.find(worker) == "a"
    worker.instance = "restarted"
    assert known.find(worker) is None
    known.keep(worker, {0: "b"})
    known.forget(worker)
    assert known.find(worker) is None


def test_the_bootstrap_address_of_an_ipv6_host_has_a_scheme_and_brackets():
    assert bootstrap_address("http://[::1]:30000", 8998) == "http://[::1]:8998"
