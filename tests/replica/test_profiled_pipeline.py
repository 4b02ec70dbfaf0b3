import json

import pytest
import trio

from omni_proxy.replica.api.app import build_app
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang import profile_routes
from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.runtime import open_pipeline
from omni_proxy.replica.profile_report import main

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
KEY = {"Authorization": "Bearer k"}


def app_with_profiling(client, key):
    context = RouteContext(client=client, admin_api_key=key)
    app = build_app(context)
    profile_routes.mount(app, context)
    return app


@pytest.fixture(scope="module", params=[(), ("decode",)], ids=["threads", "process"])
def recorded(request, tmp_path_factory):
    """The folder of one recorded chat, and the responses of the routes."""
    folder = tmp_path_factory.mktemp("events")

    async def record():
        options = BuiltinOptions(model="tiny", own_process=frozenset(request.param))
        async with open_pipeline(builtin_pipeline(options)) as (coordinator, runtime):
            app = app_with_profiling(Client(coordinator), "k")
            with trio.fail_after(60):
                await runtime.ready.wait()
                client = app.test_client()
                body = {"run_id": "r1", "event_dir": str(folder)}
                started = await client.post("/start_request_profile", json=body, headers=KEY)
                response = await client.post("/v1/chat/completions", json=CHAT)
                await response.get_data()
                stopped = await client.post("/stop_request_profile", json={}, headers=KEY)
                return await started.get_json(), await stopped.get_json()

    return folder, trio.run(record)


def test_the_routes_return_the_run_id_and_the_folder(recorded):
    folder, (started, stopped) = recorded
    assert started == {"run_id": "r1", "event_dir": str(folder)}
    assert stopped == {"run_id": "r1"}


def test_a_request_can_be_followed_through_every_stage(recorded, capsys):
    folder, _ = recorded
    assert main([str(folder), "--format", "json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["request_count"] == 1
    ((_, events),) = body["timelines"].items()
    names = [(event["stage"], event["event_name"]) for event in events]
    for expected in (
        ("coordinator", "request_admission"),
        ("prepare", "stage_input_received"),
        ("prepare", "preprocess_start"),
        ("prepare", "stage_hop_sent"),
        ("decode", "stage_input_received"),
        ("decode", "scheduler_request_build_start"),
        ("decode", "scheduler_request_build_end"),
        ("decode", "scheduler_queue_enter"),
        ("decode", "scheduler_prefill_start"),
        ("decode", "scheduler_prefill_end"),
        ("decode", "scheduler_first_emit"),
        ("decode", "stage_first_stream_chunk_sent"),
        ("coordinator", "coordinator_stream_received"),
        ("coordinator", "stage_stream_chunk_received"),
        ("decode", "stage_complete"),
        ("coordinator", "terminal_response"),
    ):
        assert expected in names, (expected, names)
    hops = {(row["src"], row["dst"], row["kind"]) for row in body["hop_breakdown"]}
    assert {("prepare", "decode", "payload"), ("decode", "coordinator", "stream_chunk")} <= hops


def test_each_chunk_is_recorded_under_both_names_and_counts_as_one_hop(recorded, capsys):
    folder, _ = recorded
    main([str(folder), "--format", "json"])
    body = json.loads(capsys.readouterr().out)
    ((_, events),) = body["timelines"].items()

    def metadata_of(name):
        return [event["metadata"] for event in events if event["event_name"] == name]

    received = metadata_of("stage_stream_chunk_received")
    assert received == metadata_of("coordinator_stream_received")
    sent = [chunk["chunk_id"] for chunk in metadata_of("stage_stream_chunk_sent")]
    assert [chunk["chunk_id"] for chunk in received] == sent
    assert received[0] == {"from_stage": "decode", "chunk_id": 0, "modality": "text"}
    hops = {(row["src"], row["dst"]): row["count"] for row in body["hop_breakdown"]}
    assert hops["decode", "coordinator"] == len(received)


def test_the_end_of_a_stage_has_its_next_stages_or_is_terminal(recorded, capsys):
    folder, _ = recorded
    main([str(folder), "--format", "json"])
    ((_, events),) = json.loads(capsys.readouterr().out)["timelines"].items()
    ends = {e["stage"]: e["metadata"] for e in events if e["event_name"] == "stage_complete"}
    assert ends == {
        "prepare": {"terminal": False, "next": ["decode"]},
        "decode": {"terminal": True},
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/start_profile", {}, 400, "trace_path_template is required"),
        ("/start_profile", {"enable_torch": False}, 400, "event_dir is required"),
        ("/start_request_profile", {}, 400, "event_dir is required"),
        ("/start_profile", {"enable_torch": "maybe"}, 422, "enable_torch"),
        ("/stop_profile", None, 422, "Field required"),
    ],
)
async def test_invalid_requests_name_the_missing_key(path, body, status, reason, monkeypatch):
    monkeypatch.delenv(profile_routes.FOLDER_VARIABLE, raising=False)
    app = app_with_profiling(Client.__new__(Client), None)
    fields = {"json": body} if body is not None else {}
    response = await app.test_client().post(path, **fields)
    assert response.status_code == status
    assert reason in (await response.get_data(as_text=True))


async def test_profiling_requires_the_key():
    app = app_with_profiling(Client.__new__(Client), "k")
    response = await app.test_client().post("/start_profile", json={})
    assert response.status_code == 401
