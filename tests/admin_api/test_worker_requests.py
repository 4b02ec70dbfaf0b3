import pytest

from omni_proxy.admin_api.worker_requests import parse_add, parse_patch, parse_put
from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.wire.errors import HttpError

URL = "http://127.0.0.1:1"


def add(body, *, prefers_async=False):
    return parse_add(body, prefers_async=prefers_async)


def put(body, *, prefers_async=False):
    return parse_put(body, URL, prefers_async=prefers_async)


def refusal(parse, *args, **kwargs):
    with pytest.raises(HttpError) as caught:
        parse(*args, **kwargs)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize("url", [URL, URL + "/", "HTTP://127.0.0.1:1"])
def test_a_complete_spec_may_spell_the_url_in_another_way(url):
    assert put({"url": url, "priority": 3}).note_fields == {"priority": 3}


@pytest.mark.parametrize("url", [URL + "0", "nonsense", 5, None])
def test_a_complete_spec_may_not_change_the_url(url):
    assert "url must stay the same" in refusal(put, {"url": url, "priority": 3})


def test_an_addition_with_omnis_keys_is_not_in_the_background():
    parsed = add({"url": URL, "model": " m ", "capabilities": ["streaming", "chat", "chat"]})
    assert not parsed.in_background
    assert parsed.settings == {"model": "m", "capabilities": ("chat", "streaming")}


@pytest.mark.parametrize("key", ["worker_type", "priority", "cost", "labels", "api_key", "dp_size"])
def test_an_addition_with_a_key_of_smg_is_in_the_background(key):
    value = {"worker_type": "regular", "labels": {}, "priority": 1, "cost": 2}.get(key, "x")
    assert add({"url": URL, key: value}).in_background


def test_an_addition_can_be_in_the_background_by_preference():
    assert add({"url": URL}, prefers_async=True).in_background


def test_unknown_keys_are_named_in_order():
    assert refusal(add, {"url": URL, "b": 1, "a": 2}) == "unsupported fields: a, b"
    assert refusal(put, {"x": 1}) == "unsupported fields: x"
    assert refusal(parse_patch, {"disabled": True}) == "unsupported fields: disabled"


def test_a_put_may_name_the_url_that_the_worker_has():
    assert not put({"url": URL}).in_background
    assert put({"url": URL}).settings == {}
    assert "url must stay" in refusal(put, {"url": "http://127.0.0.1:2"})
    assert put({"url": URL, "priority": 2}).in_background
    assert "url must stay" in refusal(put, {"url": "http://127.0.0.1:2", "priority": 2})


def test_an_empty_put_or_patch_is_refused():
    assert refusal(put, {}) == "at least one worker field is required"
    assert refusal(parse_patch, {}) == "at least one worker field is required"


@pytest.mark.parametrize("value", ["true", 1, 0, None, []])
@pytest.mark.parametrize("name", ["is_dead", "disabled"])
def test_flags_are_booleans(name, value):
    assert refusal(put, {name: value}) == f"{name} must be a boolean"


@pytest.mark.parametrize("value", [[], "chat", None, {}, ["fly"], [1], [["chat"]]])
def test_capabilities_are_known_names(value):
    assert "capabilit" in refusal(add, {"url": URL, "capabilities": value})


def test_every_capability_is_accepted():
    assert add({"capabilities": list(CAPABILITIES)}).settings["capabilities"] == CAPABILITIES


@pytest.mark.parametrize("value", [None, "", "   "])
def test_a_blank_model_clears_it(value):
    assert put({"model": value}).settings == {"model": ""}


@pytest.mark.parametrize("value", [1, True, [], {}])
def test_a_model_is_a_string(value):
    assert refusal(put, {"model": value}) == "model must be a string or null"


@pytest.mark.parametrize(
    "body", [{"model_id": "m"}, {"models": ["m", "n"]}, {"models": [{"id": "m"}]}]
)
def test_the_keys_of_smg_for_a_model_are_read(body):
    assert add(body).settings == {"model": "m"}


def test_notes_of_smg_are_stored_and_other_keys_reported_as_ignored():
    parsed = add({"url": URL, "priority": 7, "labels": {"a": "b"}, "api_key": "x", "kv_role": "y"})
    assert parsed.note_fields == {"priority": 7, "labels": {"a": "b"}}
    assert parsed.ignored == ["api_key", "kv_role"]


@pytest.mark.parametrize(
    "body",
    [
        {"priority": -1}, {"priority": True}, {"priority": 1.5}, {"cost": "1"}, {"cost": False},
        {"labels": []}, {"worker_type": "encode"}, {"connection_mode": "grpc"},
        {"role": "prefil"}, {"role": None}, {"kv_connector": "moriio"}, {"kv_connector": 1},
        {"bootstrap_port": 0}, {"bootstrap_port": "8998"}, {"bootstrap_port": 65536},
        {"bootstrap_port": True},
    ],
)  # fmt: skip
def test_unsupported_values_of_smg_keys_are_refused(body):
    assert f"{next(iter(body))} must be" in refusal(add, body)


def test_the_role_is_read_in_both_dialects():
    sglang = add({"url": URL, "worker_type": "prefill", "bootstrap_port": 9001})
    assert sglang.settings == {"role": "prefill", "bootstrap_port": 9001}
    assert (sglang.in_background, sglang.ignored) == (True, [])
    omni = add({"url": URL, "role": "decode", "kv_connector": "nixl", "bootstrap_port": None})
    assert omni.settings == {"role": "decode", "kv_connector": "nixl", "bootstrap_port": 0}
    assert not omni.in_background
    assert put({"role": "regular"}).settings == {"role": "regular"}
    assert parse_patch({"role": "prefill"}).settings == {"role": "prefill"}


def test_contradicting_keys_of_a_role_are_refused():
    body = {"url": URL, "role": "prefill", "worker_type": "decode"}
    assert "differ" in refusal(add, body)
    body = {"url": URL, "role": "decode", "bootstrap_port": 9001}
    assert "for prefill workers only" in refusal(add, body)


def test_ranks_and_adapters_are_read():
    assert add({"url": URL, "ranks": 8, "loras": ["a"]}).settings == {"ranks": 8, "loras": ("a",)}
    both = add({"url": URL, "ranks": "auto", "loras": "auto"})
    assert both.settings == {"ranks": "auto", "loras": "auto"}


@pytest.mark.parametrize("body", [{"ranks": 0}, {"ranks": "all"}, {"loras": "x"}, {"loras": [""]}])
def test_invalid_ranks_and_adapters_are_refused(body):
    assert f"{next(iter(body))} must be" in refusal(add, body)


def test_a_put_without_a_known_worker_is_parsed_too():
    assert parse_put({"url": URL, "cost": 1}, None, prefers_async=False).in_background
