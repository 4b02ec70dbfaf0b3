"""vLLM's control routes: responses and errors as captured from vLLM 0.32.

Source: note:real-engines 5.1.
"""

import json

import pytest

from tests.replica.api.api_fixture import HELLO, HOLD, opened

RPC = (
    "Call to collective_rpc method failed: Worker failed with error '{}', please check the stack "
    "trace above for the root cause"
)


def missing(name):
    return (
        "1 validation error:\n  "
        f"{{'type': 'missing', 'loc': 'body.{name}', 'msg': 'Field required', 'input': 'None'}}"
    )


async def status_and_body(response):
    data = await response.get_data()
    return response.status_code, json.loads(data) if data else None


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reply"),
    [
        ("GET", "/is_paused", None, 200, {"is_paused": False}),
        ("POST", "/pause?mode=keep&clear_cache=false", None, 200, {"status": "paused"}),
        ("POST", "/pause", None, 200, {"status": "paused"}),
        ("POST", "/pause?mode=wait", None, 200, {"status": "paused"}),
        ("POST", "/resume", None, 200, {"status": "resumed"}),
        ("GET", "/get_world_size", None, 200, {"world_size": 1}),
        ("GET", "/get_world_size?include_dp=false", None, 200, {"world_size": 1}),
        ("GET", "/weight_info", None, 200, {"weight_version": "default"}),
        (
            "POST", "/update_weight_version", {"new_version": "step-7"}, 200,
            {"success": True, "new_version": "step-7"},
        ),
        ("POST", "/sleep?level=1", None, 200, {"status": "sleeping", "level": 1}),
        ("POST", "/wake_up", None, 200, {"status": "awake", "tags": None}),
        ("GET", "/is_sleeping", None, 200, {"is_sleeping": False}),
        ("POST", "/reset_prefix_cache", None, 200, {"success": True}),
        (
            "POST", "/reset_prefix_cache?reset_running_requests=true", None, 200, {"success": True},
        ),
        ("POST", "/reset_mm_cache", None, 200, None),
        ("POST", "/abort_requests", {}, 200, {"status": "aborted", "aborted": 0}),
        (
            "POST", "/abort_requests", {"request_ids": ["zzz"]}, 200,
            {"status": "aborted", "aborted": 1},
        ),
        ("POST", "/inference/v1/abort_requests", {"request_ids": ["zzz"]}, 200, None),
        ("POST", "/start_weight_update", None, 200, {"message": "Weight update started"}),
        ("GET", "/load", None, 200, {"server_load": 0}),
        ("GET", "/ping", None, 200, None),
    ],
)  # fmt: skip
async def test_each_call_has_vllms_response(engine, method, path, body, status, reply):
    data = b"" if body is None else json.dumps(body).encode()
    assert await status_and_body(await engine.call(method, path, data)) == (status, reply)


def error(message, param=None, status=400, kind="Bad Request"):
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@pytest.mark.parametrize(
    ("path", "body", "reply"),
    [
        (
            "/pause?mode=bogus", None,
            error(
                "1 validation error:\n  {'type': 'literal_error', 'loc': 'query.mode', 'msg': "
                "\"Input should be 'abort', 'wait' or 'keep'\", 'input': 'bogus', 'ctx': "
                "{'expected': \"'abort', 'wait' or 'keep'\"}}",
                "query.mode",
            ),
        ),
        ("/init_weight_transfer_engine", None, error(missing("init_info"), "body.init_info")),
        ("/init_weight_transfer_engine", {}, error(missing("init_info"), "body.init_info")),
        ("/update_weights", {}, error(missing("update_info"), "body.update_info")),
        ("/update_weight_version", {}, error(missing("new_version"), "body.new_version")),
        (
            "/weight_checker", {"action": "compare"},
            error("action='compare' requires a 'baseline' object"),
        ),
        ("/collective_rpc", {}, error("Missing 'method' in request body")),
        ("/abort_requests", None, error("Invalid JSON format")),
        ("/abort_requests", {"request_ids": 5}, error("'request_ids' must be a list of strings")),
        ("/abort_requests", [], error("Request body must be a JSON object")),
        ("/inference/v1/abort_requests", {}, error("Missing 'request_ids' in request body")),
    ],
)  # fmt: skip
async def test_each_invalid_call_has_vllms_400(engine, path, body, reply):
    data = b"" if body is None else json.dumps(body).encode()
    assert await status_and_body(await engine.call("POST", path, data)) == (400, reply)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/collective_rpc", {"method": "nope"}, "'Worker' object has no attribute 'nope'"),
        ("/collective_rpc", {"method": "reload_weights"}, "reload_weights needs kwargs.weights_path"
         " here"),
        ("/start_draft_weight_update", None, "there is no draft model here: call "
         "start_weight_update"),
        ("/finish_weight_update", {"weight_version": "v9"}, "finish_weight_update called without a "
         "matching start_weight_update."),
        ("/update_weights", {"update_info": {}}, "start_weight_update must be called before "
         "update_weights."),
        ("/init_weight_transfer_engine", {"init_info": {}}, "init_info.rank_offset must be a whole "
         "number, not None"),
    ],
)  # fmt: skip
async def test_an_error_of_the_engine_worker_is_vllms_500(engine, path, body, reason):
    data = b"" if body is None else json.dumps(body).encode()
    expected = error(RPC.format(reason), status=500, kind="InternalServerError")
    assert await status_and_body(await engine.call("POST", path, data)) == (500, expected)


async def test_invalid_levels_and_flags_are_refused_by_name(engine):
    for path, param in (
        ("/sleep?level=9", "query.level"),
        ("/sleep?level=-1", "query.level"),
        ("/sleep?level=x", "query.level"),
        ("/pause?clear_cache=maybe", "query.clear_cache"),
    ):
        status, reply = await status_and_body(await engine.call("POST", path))
        assert (status, reply["error"]["param"]) == (400, param)


async def test_the_checker_hashes_every_tensor_while_paused(engine):
    await engine.post("/pause?mode=keep")
    _, reply = await status_and_body(await engine.post("/weight_checker", {"action": "checksum"}))
    names = list(reply["checksums"])
    assert "dp0:pp0:pcp0:tp0:model.embed_tokens.weight" in names
    assert len(set(reply["checksums"].values())) > 10
    compare = {"action": "compare", "baseline": {**reply["checksums"], names[0]: "x", "y": "z"}}
    _, comparison = await status_and_body(await engine.post("/weight_checker", compare))
    assert comparison == {"match": False, "mismatches": sorted([names[0], "y"])}


async def test_calls_that_change_state_need_the_key_and_reads_do_not(engine):
    locked = engine.with_options(admin_api_key="secret")
    for path in ("/pause", "/start_weight_update", "/sleep", "/wake_up", "/reset_prefix_cache"):
        status, reply = await status_and_body(await locked.call("POST", path))
        assert (status, reply["error"]["type"]) == (401, "Unauthorized")
    status, _ = await status_and_body(await locked.post("/abort_requests", {}))
    assert status == 401
    status, reply = await status_and_body(await locked.get("/is_paused"))
    assert (status, reply) == (200, {"is_paused": False})
    key = {"Authorization": "Bearer secret"}
    assert (await locked.call("POST", "/pause", headers=key)).status_code == 200
    wrong = {"Authorization": "Bearer x"}
    assert (await locked.call("POST", "/resume", headers=wrong)).status_code == 403


@pytest.mark.parametrize(
    ("dialect", "present", "absent"),
    [
        ("vllm", ["/pause", "/tokenize"], ["/pause_generation", "/model_info", "/generate"]),
        ("sglang", ["/pause_generation", "/tokenize"], ["/pause", "/update_weights"]),
        ("both", ["/pause_generation", "/pause", "/generate"], []),
    ],
)
async def test_a_dialect_has_its_own_routes_and_no_others(dialect, present, absent):
    async with opened(dialect=dialect) as api:
        rules = {rule.rule for rule in api.app.url_map.iter_rules()}
        assert rules >= {*present, "/v1/messages", "/v1/responses", "/health", "/v1/tokenize"}
        assert not rules & set(absent)


async def test_the_version_route_is_vllms_only_in_the_vllm_dialect(tiny):
    _, reply = await status_and_body(
        await tiny.post("/update_weight_version", {"new_version": "v"})
    )
    assert {"new_version", "message", "results"} <= reply.keys()
    vllm_only = tiny.with_options(dialect="vllm")
    _, reply = await status_and_body(
        await vllm_only.post("/update_weight_version", {"new_version": "w"})
    )
    assert reply == {"success": True, "new_version": "w"}


async def test_a_pipeline_without_weights_refuses_weight_calls(api):
    status, reply = await status_and_body(await api.post("/start_weight_update"))
    assert (status, reply["error"]["code"]) == (500, 500)
    assert await status_and_body(await api.get("/get_world_size")) == (200, {"world_size": 1})


async def test_abort_requests_aborts_requests_of_a_scripted_stage(api):
    import trio

    replies = []

    async def chat():
        replies.append(await status_and_body(await api.chat(HOLD)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(chat)
        while api.client.health()["pending_completions"] != 1:
            await trio.lowlevel.checkpoint()
        assert (await status_and_body(await api.post("/abort_requests", {})))[1]["aborted"] == 1
    assert replies == [(500, {"detail": "aborted"})]
    assert (await api.chat(HELLO)).status_code == 200
