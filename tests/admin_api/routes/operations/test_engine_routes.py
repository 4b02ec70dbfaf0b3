import json
import time

import httpx
import pytest

from omni_proxy.admin_api.serializers import metrics_text
from omni_proxy.admin_api.serializers.load_report import MAX_RANKS, MAX_RECORDS, loads_response
from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.upstream_http.client import CallResult
from omni_proxy.wire.bounded_json import MAX_VALUES
from tests.admin_api.api_fixture import A, B, build_api, entry

RANKS = json.dumps({"loads": [{"dp_rank": 0}] * MAX_RANKS}).encode()


async def call_route(api, path, method="get", **headers):
    response = await getattr(api.client(), method)(path, headers=headers)
    return response.status_code, await response.get_json()


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_counts_the_ranks_of_all_workers(api, engines, path):
    api.healthy(A, B)
    engines.set_reply(A, "/server_info", {
        "tp_size": 2, "model_path": "m", "radix_cache": True, "port": 1, "version": "1",
        "internal_states": [{"a": 1}], "max_total_num_tokens": 100,
    })  # fmt: skip
    engines.set_reply(B, "/get_server_info", {
        "model_path": "m", "radix_cache": False, "port": 2, "version": "2",
        "internal_states": [{"b": 1}], "max_total_num_tokens": 50,
    })  # fmt: skip
    status, body = await call_route(api, path)
    assert status == 200
    assert body["tp_size"] == 3
    assert (body["model_path"], body["version"]) == ("m", None)
    assert body["radix_cache"] is False
    assert body["max_total_num_tokens"] == 150
    assert body["internal_states"] == [{"a": 1}, {"b": 1}]
    assert "port" not in body
    assert [worker["url"] for worker in body["workers"]] == [A, B]


@pytest.mark.parametrize(("mode", "ranks"), [("coordinate", 3), ("receive", 1), ("both", 4)])
async def test_the_ranks_for_a_trainers_group_depend_on_the_mode(engines, mode, ranks):
    api = build_api(entry(A), entry(B), weight_sync=WeightSyncConfig(mode=mode))
    api.healthy(A, B)
    api.fleet.cordon(api.worker(A), "uncertain")
    engines.set_reply(A, "/server_info", {"tp_size": 2, "radix_cache_enabled": True})
    engines.set_reply(B, "/server_info", {"tp_size": 1, "radix_cache_enabled": False})
    _, body = await call_route(api, "/server_info")
    assert body["tp_size"] == ranks
    assert body["radix_cache_enabled"] is True


async def test_one_unreachable_worker_lacks_only_its_own_info(api, engines):
    api.healthy(A, B)
    engines.replies[A, "/server_info"] = httpx.ConnectError("refused")
    engines.set_reply(B, "/server_info", {"tp_size": 4})
    status, body = await call_route(api, "/server_info")
    assert (status, body["tp_size"]) == (200, 4)
    assert body["workers"][0] == {"url": A, "info": None, "error": "ConnectError"}


async def test_without_any_server_info_the_502_has_the_reason_of_each_worker(api, engines):
    api.healthy(A)
    status, body = await call_route(api, "/server_info")
    assert status == 502
    assert body["details"] == {A: "status=404", B: "status=404"}
    assert body["error"]["code"] == "server_info_unavailable"


@pytest.mark.parametrize("path", ["/get_model_info", "/health_generate"])
async def test_without_a_routable_worker_the_status_is_503(api, engines, path):
    assert (await call_route(api, path))[0] == 503


async def test_in_mode_off_only_routable_workers_count_in_the_ranks(engines):
    api = build_api(entry(A), entry(B), weight_sync=WeightSyncConfig(mode="off"))
    assert (await call_route(api, "/server_info"))[0] == 503
    api.healthy(A)
    for url, size in ((A, 2), (B, 4)):
        engines.set_reply(url, "/server_info", {"tp_size": size})
    assert (await call_route(api, "/server_info"))[1]["tp_size"] == 2


async def test_model_info_is_that_of_the_first_routable_worker_that_answers(api, engines):
    api.healthy(A, B)
    engines.replies[A, "/get_model_info"] = httpx.ConnectError("refused")
    engines.set_reply(B, "/model_info", {"model_path": "m", "weight_version": "7"})
    assert await call_route(api, "/get_model_info") == (
        200,
        {"model_path": "m", "weight_version": "7"},
    )
    assert [r.url.path for r in engines.requests][-2:] == ["/get_model_info", "/model_info"]


async def test_model_info_is_read_from_the_model_list_if_no_route_has_it(api, engines):
    api.healthy(A)
    card = {"id": "name", "root": "/models/m", "max_model_len": 2048}
    engines.set_reply(A, "/v1/models", {"data": [card]})
    info = {"model_path": "/models/m", "max_model_len": 2048}
    assert await call_route(api, "/get_model_info") == (200, info)
    engines.set_reply(A, "/v1/models", {"data": [{"id": "name", "root": None}]})
    assert await call_route(api, "/get_model_info") == (200, {"model_path": "name"})
    for junk in ([], {"data": {}}, {"data": [1]}, {"data": [{"id": 5}]}, {}):
        engines.set_reply(A, "/v1/models", junk)
        status, body = await call_route(api, "/get_model_info")
        assert (status, body["details"]) == (502, {A: "status=404"})


@pytest.mark.parametrize(
    "junk", [b"", b"{", b"[1]", b"[" * 90_000, b'{"x": [' + b"{}," * MAX_VALUES + b"{}]}"]
)
async def test_model_info_is_json_for_any_reply_of_a_worker(api, engines, junk):
    api.healthy(A, B)
    engines.set_reply(A, "/get_model_info", junk)
    engines.set_reply(B, "/get_model_info", b'{"model_path": "m", "x": NaN, "y": -Infinity}')
    info = {"model_path": "m", "x": None, "y": None}
    assert await call_route(api, "/get_model_info") == (200, info)
    engines.set_reply(B, "/get_model_info", junk)
    status, body = await call_route(api, "/get_model_info")
    assert (status, body["details"]) == (502, {A: "no JSON object", B: "no JSON object"})


@pytest.mark.parametrize("ranks", [MAX_RANKS + 1, MAX_VALUES])
@pytest.mark.parametrize("rank", [b"{}", b'{"dp_rank": 0}'])
async def test_loads_with_too_many_ranks_are_replaced_by_our_own_count(api, engines, ranks, rank):
    engines.set_reply(A, "/v1/loads", b'{"loads": [' + b",".join([rank] * ranks) + b"]}")
    engines.set_reply(B, "/v1/loads", {"loads": [{"dp_rank": 7}]})
    _, body = await call_route(api, "/get_loads")
    assert [(load["worker"], load["dp_rank"]) for load in body["loads"]] == [(A, 0), (B, 7)]


async def test_the_loads_of_all_engines_together_are_bounded(api):
    engines = 2 * MAX_RECORDS // MAX_RANKS
    results = [CallResult(api.worker(), 200, RANKS, "", 0.0)] * engines
    response = await loads_response(results)
    assert len(response["loads"]) == MAX_RECORDS + engines // 2


async def test_a_rank_that_is_not_a_number_is_not_passed_on(api, engines):
    engines.set_reply(A, "/v1/loads", {"loads": [{"dp_rank": {"much": [1] * 1000}, "x": 1}]})
    _, body = await call_route(api, "/get_loads")
    assert body["loads"][0]["dp_rank"] == 0


async def test_loads_have_the_fields_of_both_dialects(api, engines):
    api.healthy(A, B)
    api.worker(B).in_flight = 3
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 5, "num_total_reqs": 7, "token_usage": 0.5}
    engines.set_reply(A, "/v1/loads", {"loads": [rank, {"dp_rank": 1, "num_running_reqs": 1}]})
    status, body = await call_route(api, "/get_loads")
    assert status == 200
    assert body["workers"] == [{"worker": A, "load": 0}, {"worker": B, "load": 3}]
    shown = [
        (load["worker"], load["dp_rank"], load["num_running_reqs"], load["source"])
        for load in body["loads"]
    ]
    assert shown == [(A, 0, 2, "engine"), (A, 1, 1, "engine"), (B, 0, 3, "proxy")]
    assert body["aggregate"]["total_running_reqs"] == 6
    assert body["aggregate"]["total_waiting_reqs"] == 5


async def test_a_worker_that_cannot_be_reached_has_load_minus_one(api, engines):
    engines.replies[A, "/v1/loads"] = httpx.ConnectError("refused")
    _, body = await call_route(api, "/v1/loads")
    assert body["workers"][0] == {"worker": A, "load": -1}


@pytest.mark.parametrize("junk", [[], {"loads": 7}, {"loads": ["x"]}, b"\xff", {"loads": None}])
async def test_invalid_loads_count_as_missing(api, engines, junk):
    engines.set_reply(A, "/v1/loads", junk)
    status, body = await call_route(api, "/get_loads")
    assert status == 200
    assert body["loads"][0]["source"] == "proxy"


@pytest.mark.parametrize(
    "odd",
    [b'{"dp_rank": "\\ud800"}', b'{"token_usage": 1%b}' % (b"0" * 400), b'{"token_usage": NaN}'],
)
async def test_json_values_that_cannot_be_exported_are_harmless_in_loads(api, engines, odd):
    engines.set_reply(A, "/v1/loads", b'{"loads": [%b]}' % odd)
    engines.set_reply(B, "/v1/loads", {"loads": [{"num_running_reqs": 3}]})
    status, body = await call_route(api, "/get_loads")
    assert (status, body["aggregate"]["total_running_reqs"]) == (200, 3)
    assert body["loads"][0]["token_usage"] == 0


async def test_a_flush_is_sent_to_every_live_worker_whose_prefixes_are_then_cleared(api, engines):
    api.healthy(A, B)
    cleared = []
    api.fleet.watch_cache_cleared(cleared.append)
    engines.set_reply(A, "/flush_cache", b"flushed")
    engines.set_reply(B, "/flush_cache", b"busy", status=400)
    status, body = await call_route(api, "/flush_cache", "post", Authorization="Bearer w")
    assert (status, body["status"], body["workers_flushed"]) == (502, "partial", 1)
    assert body["failed"] == {B: "status=400"}
    assert cleared == [api.worker(A)]
    assert {r.headers["authorization"] for r in engines.requests} == {"Bearer w"}
    engines.set_reply(B, "/flush_cache", b"flushed")
    assert (await call_route(api, "/flush_cache", "post"))[0] == 200
    calls = len(engines.requests)
    status, body = await call_route(api, f"/flush_cache?selector=url={B}", "post")
    assert (status, body["workers_flushed"], len(engines.requests)) == (200, 1, calls + 1)
    assert (await call_route(api, "/flush_cache?selector=id=unknown", "post"))[0] == 404


async def test_generation_is_tried_on_the_least_loaded_worker_then_on_the_next(api, engines):
    api.healthy(A, B)
    api.worker(A).in_flight = 1
    engines.set_reply(B, "/health_generate", b"", status=503)
    engines.set_reply(A, "/health_generate", b"")
    assert await call_route(api, "/health_generate") == (200, {"status": "ok", "worker": A})
    assert engines.requests[0].url.port == 8012
    engines.set_reply(A, "/health_generate", b"", status=500)
    status, body = await call_route(api, "/health_generate")
    assert status == 503
    assert "status=500" in body["error"]["message"]


async def test_a_worker_without_health_generate_gets_a_completion_request(api, engines):
    api.healthy(A)
    engines.set_reply(A, "/health", {"status": "ok"})
    assert (await call_route(api, "/health_generate"))[0] == 503
    engines.set_reply(A, "/v1/completions", {"choices": []})
    assert (await call_route(api, "/health_generate"))[0] == 200


async def test_metrics_of_all_workers_become_one_text(api, engines):
    text = (
        b"# HELP sglang:num_running_reqs running\n# TYPE sglang:num_running_reqs gauge\n"
        b'sglang:num_running_reqs{model_name="m"} %d\n'
        b"# TYPE seen counter\nseen_total 4\n"
    )
    engines.set_reply(A, "/metrics", text % 1)
    engines.set_reply(B, "/metrics", text % 2)
    response = await api.client().get("/engine_metrics")
    body = (await response.get_data()).decode()
    assert response.content_type.startswith("text/plain; version=0.0.4")
    assert body.count("# TYPE sglang:num_running_reqs gauge") == 1
    assert f'sglang:num_running_reqs{{model_name="m",worker="{A}"}} 1.0' in body
    assert f'sglang:num_running_reqs{{model_name="m",worker="{B}"}} 2.0' in body
    assert f'seen_total{{worker="{A}"}} 4.0' in body


async def test_metric_names_are_kept_and_no_family_is_declared_twice(api, engines):
    engines.set_reply(
        A, "/metrics",
        b"# TYPE kept counter\nkept 1\n# TYPE seen counter\nseen_total 2\n"
        b'# TYPE of info\nof_info{v="1"} 1\n# TYPE both_total counter\nboth_total 3\n',
    )  # fmt: skip
    engines.set_reply(
        B, "/metrics",
        b"# TYPE seen_total counter\nseen_total 4\n# TYPE kept gauge\nkept 5\n"
        b"# TYPE both_total counter\r\nboth_total 6\r\n",
    )  # fmt: skip
    lines = (await (await api.client().get("/engine_metrics")).get_data()).decode().splitlines()
    for sample in (
        f'kept{{worker="{A}"}} 1.0', f'kept{{worker="{B}"}} 5.0',
        f'seen_total{{worker="{A}"}} 2.0', f'seen_total{{worker="{B}"}} 4.0',
        f'of_info{{v="1",worker="{A}"}} 1.0',
        f'both_total{{worker="{A}"}} 3.0', f'both_total{{worker="{B}"}} 6.0',
    ):  # fmt: skip
        assert sample in lines
    declared = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared))
    assert "# TYPE both_total counter" in lines


READ_SECS = 0.5  # shorter than the program's limit, which is too long for a test
BLANKS = b" " * 900_000
HOSTILE = {
    "blanks": b"f" + b" " * 7_000_000 + b"# TYPE" + BLANKS,
    "blanks in a comment": b"# TYPE" + BLANKS + b"a gauge",
    "blanks in many comments": (b"# TYPE" + b" " * 8000 + b"a gauge\n") * 900,
    "blanks before a value": b"a" + BLANKS + b"1",
    "families": b"".join(b"a%d 1\n" % number for number in range(200_000)),
    "typed families": b"".join(b"# TYPE a%d gauge\n" % number for number in range(200_000)),
    "labels": b"a{" + b",".join(b'b%d=""' % number for number in range(100_000)) + b"} 1",
    "backslashes": b'a{b="' + b"\\\\" * 400_000 + b'"} 1',
    "short lines": b"a 1\n" * 2_000_000,
    "many labels": (b"a{" + b",".join(b'b%d=""' % n for n in range(800)) + b"} 1\n") * 1000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
async def test_parsing_hostile_metrics_is_limited_in_time(api, engines, text, monkeypatch):
    monkeypatch.setattr(metrics_text, "READ_SECS", READ_SECS)
    engines.set_reply(A, "/metrics", text)
    engines.set_reply(B, "/metrics", b"x 1\n")
    began = time.process_time()
    body = (await (await api.client().get("/engine_metrics")).get_data()).decode()
    assert time.process_time() - began < 4 * READ_SECS
    assert f'x{{worker="{B}"}} 1.0' in body


@pytest.mark.parametrize("junk", [b"\xff\xfe", b"{", b"# TYPE\nx y z\n", b'x{a="', b"x 1 inf\n"])
async def test_unreadable_metrics_are_missing_for_that_worker_only(api, engines, junk):
    engines.set_reply(A, "/metrics", junk)
    engines.set_reply(B, "/metrics", b"x 1\n")
    body = (await (await api.client().get("/engine_metrics")).get_data()).decode()
    assert f'omni_proxy_engine_metrics_up{{worker="{A}"}} 0.0' in body
    assert f'x{{worker="{B}"}} 1.0' in body


async def test_a_conflicting_label_of_a_worker_is_exported_under_another_name(api, engines):
    engines.set_reply(A, "/metrics", b'x{worker="v"} 1\nx{worker="w"} 2\n')
    engines.set_reply(B, "/metrics", b"omni_proxy_engine_metrics_up 7\n")
    body = (await (await api.client().get("/engine_metrics")).get_data()).decode()
    assert f'x{{exported_worker="v",worker="{A}"}} 1.0' in body
    assert f'x{{exported_worker="w",worker="{A}"}} 2.0' in body
    assert body.count("\nomni_proxy_engine_metrics_up{") == 2
    assert " 7.0" not in body


async def test_only_protected_routes_need_the_key():
    api = build_api(entry(A), key="k")
    for path in ("/flush_cache", "/engine_metrics"):
        assert (await call_route(api, path))[0] == 401
    for path in ("/get_loads", "/liveness"):
        assert (await call_route(api, path))[0] == 200
    assert (await call_route(api, "/readiness"))[0] == 503
