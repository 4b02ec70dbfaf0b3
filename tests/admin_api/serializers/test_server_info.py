import json

import pytest

from omni_proxy.admin_api.serializers.load_report import MAX_FIELDS, merge_server_info
from omni_proxy.upstream_http.client import CallResult
from tests.admin_api.api_fixture import A, B, build_api, entry


async def merged(*infos, **fields):
    workers = build_api(entry(A), entry(B)).fleet.workers
    reported = zip(workers, infos, strict=True)
    outcomes = [CallResult(w, 200, json.dumps(info).encode(), "", 0.0) for w, info in reported]
    return await merge_server_info(outcomes, **fields)


async def test_ranks_are_added_and_what_differs_is_not_reported():
    found = await merged(
        {"tp_size": 2, "dtype": "bf16", "version": "1"}, {"dtype": "bf16", "version": 2}
    )
    assert (found["tp_size"], found["dtype"], found["version"]) == (3, "bf16", None)


@pytest.mark.parametrize(
    ("name", "reported", "expected"),
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
async def test_merged_flags_take_the_most_careful_value(name, reported, expected):
    infos = [{} if value is None else {name: value} for value in reported]
    assert (await merged(*infos)).get(name) is expected


async def test_a_path_in_the_proxys_store_is_not_reported_as_the_model_path():
    ours = {"model_path": "/dev/shm/ours/v2", "served_model_name": "m"}
    theirs = {"model_path": "/models/m", "served_model_name": "m"}

    def is_ours(path):
        return path.startswith("/dev/shm/ours/")

    assert (await merged(ours, theirs, is_ours=is_ours))["model_path"] == "/models/m"
    assert (await merged(ours, ours, is_ours=is_ours))["model_path"] == "m"
    assert (await merged(theirs, theirs, is_ours=is_ours))["model_path"] == "/models/m"


async def test_what_has_more_fields_than_any_engine_is_no_info():
    many = {f"x{number}": 0 for number in range(MAX_FIELDS + 1)}
    found = await merged(many, {"tp_size": 2})
    assert found["tp_size"] == 2
    assert [each["info"] for each in found["workers"]] == [None, {"tp_size": 2}]


async def test_the_keys_of_an_engine_are_not_reported():
    reported = {
        "api_key": "s3cret", "admin_api_key": None, "tp_size": 1,
        "internal_states": [{"api_key": "s3cret", "x": 1}, "odd"],
    }  # fmt: skip
    found = await merged(reported, reported)
    assert "s3cret" not in json.dumps(found)
    assert (found["api_key"], found["admin_api_key"]) == ("***", None)
    assert found["workers"][0]["info"]["internal_states"] == [{"api_key": "***", "x": 1}, "odd"]
