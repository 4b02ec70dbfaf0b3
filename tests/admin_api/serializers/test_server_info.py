import json

import pytest

from omni_proxy.admin_api.serializers.load_report import MAX_FIELDS, merge_server_info
from omni_proxy.upstream_http.client import CallResult
from tests.admin_api.api_fixture import A, B, build_api, entry


async def merged(*infos, **fields):
    workers = build_api(entry(A), entry(B)).fleet.workers
    pairs = zip(workers, infos, strict=True)
    results = [CallResult(w, 200, json.dumps(info).encode(), "", 0.0) for w, info in pairs]
    return await merge_server_info(results, **fields)


async def test_ranks_are_added_and_fields_that_differ_are_not_reported():
    info = await merged(
        {"tp_size": 2, "dtype": "bf16", "version": "1"}, {"dtype": "bf16", "version": 2}
    )
    assert (info["tp_size"], info["dtype"], info["version"]) == (3, "bf16", None)


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("disable_radix_cache", (True, True), True),
        ("disable_radix_cache", (True, False), False),
        ("disable_radix_cache", (True, None), None),
        ("enable_lora", (True, False), False),
        ("radix_cache_enabled", (False, True), True),
        ("radix_cache_enabled", (False, None), None),
        ("fp8_kv_cache_enabled", (None, True), True),
        ("fp8_kv_cache_requires_postprocess", (False, True), True),
        ("fp8_kv_cache_static_scales", (False, False), False),
    ],
)
async def test_merged_flags_have_the_most_conservative_value(name, flags, expected):
    infos = [{} if value is None else {name: value} for value in flags]
    assert (await merged(*infos)).get(name) is expected


async def test_a_path_in_the_proxys_store_is_not_reported_as_the_model_path():
    stored = {"model_path": "/dev/shm/ours/v2", "served_model_name": "m"}
    original = {"model_path": "/models/m", "served_model_name": "m"}

    def is_ours(path):
        return path.startswith("/dev/shm/ours/")

    assert (await merged(stored, original, is_ours=is_ours))["model_path"] == "/models/m"
    assert (await merged(stored, stored, is_ours=is_ours))["model_path"] == "m"
    assert (await merged(original, original, is_ours=is_ours))["model_path"] == "/models/m"


async def test_info_with_too_many_fields_is_ignored():
    many = {f"x{number}": 0 for number in range(MAX_FIELDS + 1)}
    info = await merged(many, {"tp_size": 2})
    assert info["tp_size"] == 2
    assert [worker["info"] for worker in info["workers"]] == [None, {"tp_size": 2}]


async def test_the_keys_of_an_engine_are_not_reported():
    engine_info = {
        "api_key": "s3cret", "admin_api_key": None, "tp_size": 1,
        "internal_states": [{"api_key": "s3cret", "x": 1}, "odd"],
    }  # fmt: skip
    info = await merged(engine_info, engine_info)
    assert "s3cret" not in json.dumps(info)
    assert (info["api_key"], info["admin_api_key"]) == ("***", None)
    assert info["workers"][0]["info"]["internal_states"] == [{"api_key": "***", "x": 1}, "odd"]
