import json

import pytest

from omni_proxy.cli import main
from omni_proxy.cli.weights import rollout

A, B = "http://a:1", "http://b:1"
PATH = "/weights/rollout"


def rollout_status(state="running", updated=0, **fields):
    rows = [
        {"worker": A, "state": "updating", "step": "loading", "reason": None, "former_version": "v1"},
        {"worker": B, "state": "pending", "step": None, "reason": None, "former_version": None},
    ]  # fmt: skip
    status = {"id": "1", "state": state, "weight_version": "v2", "updated": updated, "total": 2,
            "workers": rows, "cause": None, "waits_for": None}  # fmt: skip
    return status | fields


def accepted(state="running"):
    return (202, {"success": True, "message": "it has begun", "rollout": rollout_status(state)})


def events(*rollouts):
    return (200, b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in rollouts))


def test_without_arguments_the_rollout_is_shown(proxy, capsys):
    proxy.replies[PATH] = (200, rollout_status(waits_for="waits for http://c:1"))
    assert main(["weights", "rollout", "--url", proxy.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"v2: running, 0 of 2 updated, loading {A}, waits for http://c:1"
    assert [line.split() for line in lines[1:]] == [
        ["WORKER", "STATE", "BEFORE", "REASON"], [A, "loading", "v1", "-"], [B, "pending", "-", "-"]
    ]  # fmt: skip


def test_without_a_rollout_a_message_is_printed(proxy, capsys):
    proxy.replies[PATH] = (200, {"id": None, "state": "none", "workers": []})
    assert main(["weights", "rollout", "--url", proxy.url, "--follow"]) == 0
    assert capsys.readouterr().out == "there was no rollout since the proxy started\n"


@pytest.mark.parametrize(
    ("args", "path", "body"),
    [
        (["--model-path", "/m", "--weight-version", "v2"], PATH,
         {"model_path": "/m", "weight_version": "v2"}),
        (["--version", "3", "--max-unavailable", "25%", "--canary", "2", "--drain-secs", "0"], PATH,
         {"version": 3, "max_unavailable": "25%", "canary": 2, "drain_secs": 0.0}),
        (["--version", "step-3", "--max-unavailable", "2", "--pause-after-canary"], PATH,
         {"version": "step-3", "max_unavailable": 2, "pause_after_canary": True}),
        (["--version", "3", "--selector", "model=m"], f"{PATH}?selector=model%3Dm", {"version": 3}),
        (["pause"], f"{PATH}/pause", {}),
        (["resume"], f"{PATH}/resume", {}),
        (["cancel"], f"{PATH}/cancel", {}),
    ],
)  # fmt: skip
def test_each_action_calls_its_route(proxy, args, path, body):
    proxy.replies[path.partition("?")[0]] = accepted()
    assert main(["weights", "rollout", *args, "--url", proxy.url, "--api-key", "k"]) == 0
    assert (path, body, "Bearer k") in proxy.requests


@pytest.mark.parametrize(("state", "status"), [("succeeded", 0), ("failed", 1), ("cancelled", 1)])
def test_follow_shows_each_step_once_and_ends_with_the_rollout(proxy, capsys, state, status):
    replies = [
        accepted(),
        events(
            rollout_status(),
            rollout_status(),
            rollout_status(updated=1),
            rollout_status(state, 2, cause="why"),
        ),
    ]
    proxy.replies[PATH] = lambda: replies.pop(0)
    args = ["--model-path", "/m", "--weight-version", "v2", "--follow"]
    assert main(["weights", "rollout", *args, "--url", proxy.url]) == status
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"v2: running, 0 of 2 updated, loading {A}", f"v2: running, 1 of 2 updated, loading {A}"
    ]  # fmt: skip
    assert out.splitlines()[0] == f"v2: {state}, 2 of 2 updated, loading {A}, why"
    assert proxy.requests[-1][0] == f"{PATH}?follow=true"


def test_follow_reconnects_to_a_proxy_that_restarts(proxy, capsys, monkeypatch):
    monkeypatch.setattr(rollout, "RETRY_SECS", 0.01)
    replies = [
        (200, rollout_status()),
        events(rollout_status()),
        (503, {}),
        events(rollout_status(updated=1), rollout_status("succeeded", 2)),
    ]
    proxy.replies[PATH] = lambda: replies.pop(0)
    assert main(["weights", "rollout", "--follow", "--json", "--url", proxy.url]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["state"], err) == ("succeeded", "")


def test_follow_ends_if_the_proxy_stays_unreachable(proxy, capsys, monkeypatch):
    monkeypatch.setattr(rollout, "UNREACHABLE_SECS", 0.0)
    replies = [(200, rollout_status()), (503, {"error": {"message": "it leaves"}})]
    proxy.replies[PATH] = lambda: replies.pop(0)
    assert main(["weights", "rollout", "--follow", "--url", proxy.url]) == 2
    assert "it leaves" in capsys.readouterr().err


def test_an_accepted_cancel_is_status_0(proxy):
    proxy.replies[f"{PATH}/cancel"] = accepted("rolling_back")
    assert main(["weights", "rollout", "cancel", "--url", proxy.url]) == 0
    proxy.replies[PATH] = (200, rollout_status("rolling_back"))
    assert main(["weights", "rollout", "--url", proxy.url]) == 1


def test_a_refusal_of_the_proxy_is_printed(proxy, capsys):
    error = {"error": {"message": "http://a:1 reports 'v2' already", "code": "label_in_use"}}
    proxy.replies[PATH] = (409, error)
    args = ["--model-path", "/m", "--weight-version", "v2"]
    assert main(["weights", "rollout", *args, "--url", proxy.url]) == 1
    assert "reports 'v2' already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--canary", "2"], "nothing to roll out"),
        (["pause", "--model-path", "/m"], "pause takes neither"),
    ],
)
def test_contradicting_flags_are_refused(proxy, capsys, args, message):
    assert main(["weights", "rollout", *args, "--url", proxy.url]) == 2
    assert message in capsys.readouterr().err
    assert proxy.requests == []


def test_weights_status_shows_a_running_rollout(proxy, capsys):
    weights = {
        "operation": None, "waiting": [], "weight_epoch": 3, "weight_version": "v1", "workers": [],
        "uncertain": {}, "journal": {"error": None}, "history": [], "rollout": rollout_status(),
    }  # fmt: skip
    proxy.replies["/weights"] = (200, weights)
    assert main(["weights", "--url", proxy.url]) == 0
    assert f"rollout: v2: running, 0 of 2 updated, loading {A}" in capsys.readouterr().out
    proxy.replies["/weights"] = (200, weights | {"rollout": rollout_status("succeeded")})
    assert main(["weights", "--url", proxy.url]) == 0
    assert "rollout" not in capsys.readouterr().out
