import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.admin_ops.engine_dialects import EngineCall, translate


def post(target, **fields):
    return EngineCall("POST", target, json.dumps(fields).encode() if fields else b"")


def translated(call):
    return [
        (
            translation.method,
            translation.target,
            json.loads(translation.body) if translation.body else None,
        )
        for translation in translate(call)
    ]


@pytest.mark.parametrize(
    ("mode", "translated_mode"), [("abort", "abort"), ("wait", "retract"), ("keep", "in_place")]
)
def test_a_pause_of_vllm_is_translated_for_sglang(mode, translated_mode):
    assert translated(post(f"/pause?mode={mode}&clear_cache=false")) == [
        ("POST", "/pause_generation", {"mode": translated_mode})
    ]


@pytest.mark.parametrize(
    ("mode", "translated_mode"), [("abort", "abort"), ("retract", "keep"), ("in_place", "keep")]
)
def test_a_pause_of_sglang_is_translated_for_vllm(mode, translated_mode):
    assert translated(post("/pause_generation", mode=mode)) == [
        ("POST", f"/pause?mode={translated_mode}", None)
    ]


def test_a_pause_without_a_mode_aborts_on_both_engines():
    assert translated(post("/pause")) == [("POST", "/pause_generation", {"mode": "abort"})]
    assert translated(post("/pause_generation")) == [("POST", "/pause?mode=abort", None)]


@pytest.mark.parametrize("call", [post("/pause?mode=bogus"), post("/pause_generation", mode="x")])
def test_an_unknown_mode_has_no_translation(call):
    assert translated(call) == []


def test_an_update_from_disk_becomes_a_reload_a_flush_and_a_label():
    call = post("/update_weights_from_disk", model_path="/w", weight_version="step-1")
    reload = {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}
    assert translated(call) == [
        ("POST", "/collective_rpc", reload),
        ("POST", "/reset_prefix_cache", None),
        ("POST", "/update_weight_version", {"new_version": "step-1"}),
    ]


def test_an_update_from_disk_may_keep_the_cache_and_the_label():
    call = post("/update_weights_from_disk", model_path="/w", flush_cache=False)
    assert [target for _, target, _ in translated(call)] == ["/collective_rpc"]
    assert translated(post("/update_weights_from_disk")) == []


@pytest.mark.parametrize("path", ["/weights_checker", "/weight_checker"])
def test_of_checker_actions_only_the_checksum_is_translated(path):
    (translation,) = translated(post(path, action="checksum"))
    other_path = ({"/weights_checker", "/weight_checker"} - {path}).pop()
    assert translation == ("POST", other_path, {"action": "checksum"})
    assert translated(post(path, action="reset")) == []
    assert translated(post(path, action="compare", baseline={})) == []


@pytest.mark.parametrize(
    "path",
    [
        "/sleep?level=1",
        "/wake_up",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/collective_rpc",
        "/init_weights_update_group",
        "/update_weight_version",
    ],
)
def test_a_call_that_only_one_engine_has_is_not_translated(path):
    assert translated(post(path)) == []


def test_an_adapter_is_loaded_at_the_other_path_with_the_same_body():
    body = {"lora_name": "a", "lora_path": "/a"}
    assert translated(post("/load_lora_adapter", **body)) == [
        ("POST", "/v1/load_lora_adapter", body)
    ]
    assert translated(post("/v1/unload_lora_adapter", **body)) == [
        ("POST", "/unload_lora_adapter", body)
    ]


def test_an_argument_is_read_from_the_query_first():
    assert post("/pause?mode=wait", mode="abort").argument("mode") == "wait"
    assert post("/pause", mode="keep").argument("mode") == "keep"
    assert EngineCall("POST", "/pause", b"no json").argument("mode") is None


@given(st.binary(max_size=64), st.text(max_size=20))
def test_any_body_and_any_query_can_be_translated(body, query):
    for path in ("/pause", "/pause_generation", "/update_weights_from_disk", "/weight_checker"):
        for call in translate(EngineCall("POST", f"{path}?mode={query}", body)):
            assert call.path != path
