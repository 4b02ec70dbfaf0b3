import json

import pytest

from omni_proxy.cli import main
from omni_proxy.cli.client.admin_client import AdminReply
from omni_proxy.cli.client.worker_changes import ChangeRefused, find_worker, require_accepted
from omni_proxy.cli.workers import describe_state, render_workers

A, B = "http://10.0.0.1:8000", "http://10.0.0.12:8000"


def record(url, **fields):
    name = url.removeprefix("http://")
    return {
        "id": f"http%3A%2F%2F{name.replace(':', '%3A')}", "url": url, "display_id": name,
        "model": "m", "health_state": "healthy", "in_flight": 0, "routed_requests": 3,
        "failed_requests": 0, "origin": "file", **fields,
    }  # fmt: skip


FLEET = [record(A), record(B)]
PATH_A = "/workers/http%253A%252F%252F10.0.0.1%253A8000"


@pytest.fixture
def fleet(proxy):
    proxy.requests.clear()
    proxy.replies["/workers"] = (200, {"workers": FLEET})
    return proxy


def run(fleet, *args):
    return main(["workers", *args, "--url", fleet.url])


def test_set_changes_only_weight_and_max_inflight(fleet, capsys):
    fleet.replies[PATH_A] = (200, {"status": "ok", "worker": record(A, weight=2)})
    assert run(fleet, "set", "10.0.0.1:8000", "--weight", "2", "--max-inflight", "0") == 0
    assert fleet.requests[-1][:2] == (PATH_A, {"weight": 2, "max_inflight": 0})
    assert capsys.readouterr().out.startswith(f"changed {A}")
    assert run(fleet, "set", "10.0.0.1:8000") == 1
    assert "--weight or --max-inflight" in capsys.readouterr().err


def test_the_operator_that_disabled_a_worker_is_shown():
    who = {"by": "ops (curl from 10.0.0.9)", "at": None}
    shown = describe_state(record(A, disabled=True, disabled_by=who))
    assert shown == "disabled, healthy, by ops (curl from 10.0.0.9)"


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (A, A), (f"{A}/", A), ("10.0.0.1:8000", A), ("10.0.0.12", B), ("10.0.0.12:8000", B),
        ("http%3A%2F%2F10.0.0.1%3A8000", A), ("HTTP://10.0.0.1:8000/", A),
    ],
)  # fmt: skip
def test_a_worker_is_found_by_any_of_its_names_or_a_unique_host(name, url):
    assert find_worker(FLEET, name)["url"] == url


def test_only_a_complete_port_or_host_is_a_name():
    fleet = [record("http://h:48439"), record("http://[::1]:80"), record("http://plain")]
    assert find_worker(fleet, "48439")["url"] == "http://h:48439"
    assert find_worker(fleet, "::1")["url"] == find_worker(fleet, "[::1]")["url"]
    for part in ("9", "4843", "80", ""):
        with pytest.raises(ChangeRefused):
            find_worker(fleet, part)


def test_names_are_case_insensitive():
    gpu = record("http://gpu-1:8000")
    assert (
        find_worker([*FLEET, gpu], "GPU-1:8000")
        is find_worker([*FLEET, gpu], "HTTP://Gpu-1:8000/")
        is gpu
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("8000", "names 2 workers: http://10.0.0.1:8000, http://10.0.0.12:8000"),
        (".12", r"no worker is called .12 \(its URL, host:port, host or port\); workers: "),
        ("10.0.0.3", r"no worker is called 10.0.0.3 \(.*\); workers: http://10.0.0.1:8000, "),
    ],
)
def test_an_ambiguous_or_unknown_name_lists_the_workers(name, message):
    with pytest.raises(ChangeRefused, match=message):
        find_worker(FLEET, name)
    with pytest.raises(ChangeRefused, match="workers: none"):
        find_worker([], name)


def test_a_refusal_is_printed_escaped():
    with pytest.raises(ChangeRefused, match="no"):
        require_accepted(AdminReply(409, {"error": {"message": "no"}}))
    with pytest.raises(ChangeRefused) as refused:
        require_accepted(AdminReply(400, {"error": {"message": "\x1b[2J"}}))
    assert str(refused.value) == "\\x1b[2J"


@pytest.mark.parametrize("args", [[], ["list"]])
def test_list_prints_a_table(fleet, capsys, args):
    assert run(fleet, *args) == 0
    assert capsys.readouterr().out.splitlines() == [
        "WORKER                 MODEL  BUSY  ROUTED  FAILED  WEIGHTS  ORIGIN  STATE",
        "http://10.0.0.1:8000   m         0       3       0  -        file    healthy",
        "http://10.0.0.12:8000  m         0       3       0  -        file    healthy",
    ]


def test_the_list_can_be_limited_to_a_model_and_printed_as_json(fleet, capsys):
    assert run(fleet, "list", "--model", "m", "--json") == 0
    assert fleet.requests[-1][0] == "/workers?model=m"
    assert json.loads(capsys.readouterr().out) == FLEET
    assert render_workers([]) == [
        "no workers: omni-proxy workers add URL, or put them into the file"
    ]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "healthy"),
        ({"disabled": True}, "disabled, healthy"),
        ({"held_by": ["updating", "paused"]}, "held by updating, paused, healthy"),
        ({"trial": True}, "half-open"),
        ({"health_state": "dead", "last_error": "[Errno 111] no"}, "dead: no"),
        ({"draining": {"state": "draining", "in_flight": 2}}, "draining, 2 in flight"),
        ({"draining": {"state": "drained", "deadline": "2020-01-01T00:00:00+00:00"}},
         "drained, 0 in flight"),
    ],
)  # fmt: skip
def test_a_state_has_the_reason_why_a_worker_gets_no_requests(fields, state):
    assert describe_state(record(A, **fields)) == state


@pytest.mark.parametrize(
    ("command", "body"),
    [
        ("disable", {"disabled": True}),
        ("enable", {"disabled": False}),
        ("revive", {"is_dead": False}),
    ],
)
def test_disable_enable_and_revive_change_one_worker(fleet, capsys, command, body):
    fleet.replies[PATH_A] = (200, {"status": "ok", "worker": FLEET[0]})
    assert run(fleet, command, "10.0.0.1:8000") == 0
    assert fleet.requests[-1][:2] == (PATH_A, body)
    assert capsys.readouterr().out == f"{command}d {A}: healthy\n"


def test_add_sends_model_and_capabilities(fleet, capsys):
    fleet.replies["/workers"] = (200, {"status": "ok", "worker": record("http://h:1")})
    args = ("add", "h:1", "--model", "m", "--capabilities", "chat,streaming")
    assert run(fleet, *args) == 0
    body = {"url": "http://h:1", "model": "m", "capabilities": ["chat", "streaming"]}
    assert fleet.requests[-1][:2] == ("/workers", body)
    assert capsys.readouterr().out == "added http://h:1: healthy\n"


def test_a_worker_that_is_not_healthy_is_added_only_with_no_wait(fleet, capsys):
    refusal = {"message": "h:1 did not become healthy", "code": "worker_not_healthy"}
    fleet.replies["/workers"] = (400, {"error": refusal})
    assert run(fleet, "add", "h:1") == 1
    waiting, error = capsys.readouterr().err.splitlines()
    assert "waiting until http://h:1 is healthy" in waiting
    assert error.endswith("h:1 did not become healthy; to add it now: --no-wait")
    new = record("http://h:1", health_state="unknown")
    fleet.replies["/workers"] = (202, {"status": "accepted", "worker": new})
    assert run(fleet, "add", "h:1", "--no-wait") == 0
    assert fleet.preferences[-2:] == ["wait", "respond-async"]
    assert capsys.readouterr().out == "added http://h:1: unknown\n"


def test_remove_can_wait_for_requests_in_flight(fleet, capsys):
    fleet.replies[PATH_A] = (200, {"status": "ok", "worker_id": "x", "drained": True})
    assert run(fleet, "remove", "10.0.0.1:8000", "--drain", "--timeout-secs", "5") == 0
    assert fleet.requests[-1][0] == f"{PATH_A}?drain=true&timeout_secs=5.0"
    assert capsys.readouterr().out == f"removed {A}\n"
    fleet.replies[PATH_A] = (200, {"status": "ok", "worker_id": "x", "drained": False})
    assert run(fleet, "remove", "10.0.0.1:8000", "--drain") == 1
    assert "still in flight at the deadline" in capsys.readouterr().out
    assert run(fleet, "remove", "10.0.0.1:8000", "--json") == 0


@pytest.mark.parametrize(("end", "status"), [("drained", 0), ("overdue", 1)])
def test_drain_can_wait_and_reports_how_it_ended(fleet, capsys, end, status):
    begun = record(A, draining={"state": "draining", "in_flight": 2})
    done = record(A, draining={"state": end, "in_flight": int(status)})
    fleet.replies[f"{PATH_A}/drain"] = (202, {"status": "draining", "worker": begun})
    fleet.replies[PATH_A] = (200, done)
    assert run(fleet, "drain", "10.0.0.1:8000", "--wait", "--timeout-secs", "0") == status
    posted = next(request for request in fleet.requests if request[0].endswith("/drain"))
    assert posted[1] == {"timeout_secs": 0.0}
    captured = capsys.readouterr()
    assert captured.err == f"{A}: draining, 2 in flight\n"
    assert captured.out == f"{A}: {end}, {status} in flight\n"


def test_a_failure_at_one_worker_does_not_skip_the_others(fleet, capsys):
    fleet.replies[PATH_A] = (200, {"status": "ok", "worker": FLEET[0]})
    assert run(fleet, "disable", "unknown", "10.0.0.1:8000") == 1
    captured = capsys.readouterr()
    assert "no worker is called unknown" in captured.err
    assert captured.out == f"disabled {A}: healthy\n"


def test_an_unreachable_proxy_exits_with_2(capsys):
    assert main(["workers", "--url", "http://127.0.0.1:1"]) == 2
    with pytest.raises(SystemExit) as exited:
        main(["workers", "explode"])
    assert exited.value.code == 2


def test_a_record_shows_its_reason_and_its_pause():
    record = {"health_state": "healthy", "routable": False, "why": "held: updating"}
    assert describe_state(record) == "held: updating"
    paused = {"health_state": "healthy", "routable": True, "paused": {"at": None}}
    assert describe_state(paused) == "PAUSED, healthy: omni-proxy weights continue"


def test_roles_have_a_column_only_if_a_worker_has_one(fleet):
    assert "ROLE" not in render_workers(FLEET)[0]
    pair = [record(A, role="prefill"), record(B, role="decode")]
    lines = render_workers(pair)
    assert lines[0].split()[:2] == ["WORKER", "ROLE"]
    assert lines[1].split()[:2] == [A, "prefill"]


def test_a_worker_is_added_with_its_role(fleet):
    fleet.replies["/workers"] = (200, {"worker": record(A)})
    assert run(fleet, "add", A, "--role", "prefill", "--bootstrap-port", "9001") == 0
    body = {"url": A, "role": "prefill", "bootstrap_port": 9001}
    assert fleet.requests[-1][:2] == ("/workers", body)


def test_the_number_of_adapters_is_shown_after_the_model():
    with_model = FLEET[0] | {"model": "base", "adapters": ["base:sql", "sql"]}
    without_model = FLEET[0] | {"model": None, "adapters": ["a", "b"]}
    lines = render_workers([with_model, without_model])
    assert "base +1 adapter " in lines[1]
    assert "any +2 adapters" in lines[2]
