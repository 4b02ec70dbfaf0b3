import io
import json
import threading

import pytest

from omni_proxy.cli import main
from omni_proxy.cli.weights import command as weights

A, B = "http://a:1", "http://b:1"
WEIGHTS = {
    "operation": {
        "path": "/update_weights_from_disk", "age_secs": 12.4, "step": "calling",
        "workers": [{"worker": A, "progress": "done"}, {"worker": B, "progress": "asked"}],
    },
    "waiting": [], "weight_epoch": 3, "weight_version": "v3",
    "workers": [
        {"worker": A, "weight_version": "v3", "weight_epoch": 3, "routable": True, "held_by": []},
        {"worker": B, "weight_version": None, "weight_epoch": 0, "routable": False,
         "held_by": ["uncertain", "updating"]},
    ],
    "uncertain": {B: "it died"}, "journal": {"error": None},
    "history": [{"ended_at": "2026-11-21T10:00:00.1+00:00", "path": "/pause_generation",
                 "secs": 0.5, "http_status": 200, "message": "ok"}],
}  # fmt: skip


def entry(url, *, success=True, **fields):
    return {"worker": url, "success": success, "seconds": 0.25, **fields}


def checksum_entry(url, checksum):
    data = {"per_gpu_checksum": checksum}
    return entry(url, status_code=200, body={"results": [{"stage": "t", "data": data}]})


def test_status_shows_the_operation_the_workers_and_the_history(proxy, capsys):
    proxy.replies["/weights"] = (200, WEIGHTS)
    assert main(["weights", "status", "--url", proxy.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "running: /update_weights_from_disk for 12 s, calling, 1 of 2 answered; waiting: 0"
    )
    assert lines[1] == "newest: epoch 3, version v3"
    assert [line.split() for line in lines[2:5]] == [
        ["WORKER", "VERSION", "EPOCH", "ROUTABLE", "HELD", "BY"],
        [A, "v3", "3", "yes", "-"],
        [B, "-", "0", "no", "uncertain,", "updating"],
    ]
    assert lines[5] == f"uncertain: {B}: it died"
    assert lines[6].endswith(": omni-proxy weights resolve")
    assert lines[7] == "2026-11-21T10:00:00 /pause_generation 0.5 s: 200 ok"


def test_without_a_command_the_status_is_shown(proxy, capsys):
    proxy.replies["/weights"] = (200, WEIGHTS)
    assert main(["weights", "--url", proxy.url]) == 0
    assert "newest: epoch 3, version v3" in capsys.readouterr().out


def test_status_shows_a_sync_with_its_owner(proxy, capsys):
    owner = {"group_name": "g", "master": "h:1", "caller": "", "age_secs": 9.0}
    sync = {"state": "arming", "owner": owner, "step_secs": 1.0,
            "members": [{"member": A, "progress": "asked"}]}  # fmt: skip
    proxy.replies["/weights"] = (200, WEIGHTS | {"sync": sync})
    assert main(["weights", "status", "--url", proxy.url]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line == f"sync: g at h:1, arming for 1 s, begun 9 s ago, waiting for {A}"


def test_the_json_status_is_the_reply_itself(proxy, capsys):
    proxy.replies["/weights"] = (200, WEIGHTS)
    assert main(["weights", "status", "--url", proxy.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == WEIGHTS


@pytest.mark.parametrize(
    ("args", "path", "body"),
    [
        (["pause"], "/pause_generation", {"mode": "retract"}),
        (["pause", "--mode", "abort", "--selector", "model=m"],
         "/pause_generation?selector=model%3Dm", {"mode": "abort"}),
        (["continue"], "/continue_generation", {}),
        (["checksum"], "/weights_checker", {"action": "checksum"}),
        (["resolve"], "/weights/resolve", {"acknowledge": True}),
    ],
)  # fmt: skip
def test_each_command_calls_its_route_with_the_key(proxy, args, path, body):
    reply = {"message": "ok", "results": [], "resolved_worker_ids": []}
    proxy.replies[path.partition("?")[0]] = (200, reply)
    assert main(["weights", *args, "--url", proxy.url, "--api-key", "k"]) == 0
    assert (path, body, "Bearer k") in proxy.requests


def test_failed_workers_are_in_the_table_with_their_outcome(proxy, capsys):
    lost = entry(B, success=False, error="ReadError", standing="uncertain")
    refused = entry(A, success=False, status_code=400, body={"message": "no"})
    reply = {"message": "one or more", "results": [refused, lost]}
    proxy.replies["/pause_generation"] = (502, reply)
    assert main(["weights", "pause", "--url", proxy.url]) == 1
    out = capsys.readouterr().out
    assert "status 400: no" in out
    assert "ReadError (uncertain)" in out


@pytest.mark.parametrize(
    ("checksums", "status", "text", "standings"),
    [
        (("x", "x"), 0, "all compared workers agree", ("checked", "checked")),
        (("x", "y"), 1, "the weights differ", ("mismatched", "mismatched")),
        (("x", None), 0, "nothing could be compared", ("unverified", "unverified")),
    ],
)
def test_checksums_are_compared(proxy, capsys, checksums, status, text, standings):
    results = [
        checksum_entry(url, checksum) for url, checksum in zip((A, B), checksums, strict=True)
    ]
    proxy.replies["/weights_checker"] = (200, {"message": "ok", "results": results})
    assert main(["weights", "checksum", "--url", proxy.url]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == text
    assert tuple(line.split()[1] for line in lines[2:]) == standings


def test_a_refusal_is_reported_and_is_a_failure(proxy, capsys):
    proxy.replies["/weights/resolve"] = (401, {"error": {"message": "Admin API key required"}})
    assert main(["weights", "resolve", "--url", proxy.url]) == 1
    assert "status 401: Admin API key required" in capsys.readouterr().err


def test_workers_that_stay_out_of_rotation_are_shown(proxy, capsys):
    reply = {"resolved_worker_ids": ["a"], "unresolved": {B: "ReadError"}}
    proxy.replies["/weights/resolve"] = (502, reply)
    assert main(["weights", "resolve", "--url", proxy.url]) == 1
    assert capsys.readouterr().out.splitlines() == ["back: a", f"still out: {B}: ReadError"]


def test_the_address_and_the_key_come_from_the_file(proxy, tmp_path):
    port = proxy.url.rpartition(":")[2]
    file = tmp_path / "proxy.toml"
    file.write_text(f'[server]\nhost = "0.0.0.0"\nport = {port}\n[admin]\napi_key = "secret"\n')
    proxy.replies["/weights"] = (200, WEIGHTS)
    assert main(["weights", "status", "--config", str(file)]) == 0
    assert proxy.requests[-1] == ("/weights", None, "Bearer secret")


def test_an_unreachable_proxy_exits_with_2(proxy, tmp_path, capsys):
    assert main(["weights", "status", "--url", "http://127.0.0.1:1"]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err
    proxy.replies["/weights"] = (200, b"<html>")
    assert main(["weights", "status", "--url", proxy.url]) == 2
    file = tmp_path / "proxy.toml"
    file.write_text("[server]\nprot = 1\n")
    assert main(["weights", "status", "--config", str(file)]) == 2
    with pytest.raises(SystemExit) as exited:
        main(["weights", "undo"])
    assert exited.value.code == 2


def version(number, label=None, epoch=0, **fields):
    return {
        "version": label or number, "number": number, "weight_epoch": epoch, "current": False,
        "published": epoch > 0, "created_at": "2026-11-21T10:00:00+00:00", "bytes": 3_416_512,
        "checksum": "c9b1ba8d5b07aa", "in_memory": False, "on_disk": True, **fields,
    }  # fmt: skip


THREE = {
    "store": "p/versions", "error": None,
    "versions": [version(3, None), version(2, "b", 5, current=True, in_memory=True),
                 version(1, "a", 4)],
}  # fmt: skip
ROLLED = {
    "message": "ok", "results": [entry(A)], "weight_epoch": 6, "weight_versions": {A: "a"},
}  # fmt: skip


@pytest.fixture
def store(proxy):
    proxy.replies |= {"/weights/versions": (200, THREE), "/weights/rollback": (200, ROLLED)}
    return proxy


def test_versions_are_a_table_with_their_state(store, capsys):
    assert main(["weights", "versions", "--url", store.url]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["VERSION", "NUMBER", "EPOCH", "STATE"]
    assert [row.split()[:4] for row in rows] == [
        ["3", "3", "-", "incomplete"], ["b", "2", "5", "current"], ["a", "1", "4", "kept"],
    ]  # fmt: skip
    assert rows[1].split()[-4:] == ["3.4", "MB", "memory+disk", "c9b1ba8d5b07"]
    assert main(["weights", "versions", "--url", store.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == THREE


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ({"store": None}, 'mode = "receive" or "both"'),
        ({"store": "p"}, "no versions yet in p"),
        ({"store": "p", "error": "disk full"}, "can't be stored: disk full"),
    ],
)
def test_without_versions_the_reason_is_printed(proxy, capsys, reply, text):
    proxy.replies["/weights/versions"] = (200, {"versions": [], "error": None} | reply)
    assert main(["weights", "versions", "--url", proxy.url]) == 0
    assert text in capsys.readouterr().out
    assert main(["weights", "rollback", "--url", proxy.url, "--yes"]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "number"), [([], 1), (["a"], 1), (["2"], 2), (["b"], 2), (["3"], 3)]
)
def test_a_rollback_sends_the_given_version(store, capsys, args, number):
    assert main(["weights", "rollback", *args, "--yes", "--url", store.url]) == 0
    assert ("/weights/rollback", {"version": number}, None) in store.requests
    out = capsys.readouterr().out.splitlines()
    assert (out[0], out[-1]) == ("ok", "now: a on 1, epoch 6")


def test_of_several_versions_with_one_label_the_newest_is_chosen(store):
    same = [version(3, "a", 4), version(2, "a", 7), version(1, "a", 1), version(4, "2", 2)]
    store.replies["/weights/versions"] = (200, THREE | {"versions": same})
    for name, number in (("a", 2), ("2", 4)):  # labels have precedence over numbers
        assert main(["weights", "rollback", name, "-y", "--url", store.url]) == 0
        assert store.requests[-1][1] == {"version": number}


def test_an_unknown_version_is_refused_with_a_list_of_the_stored_ones(store, capsys):
    assert main(["weights", "rollback", "z", "--yes", "--url", store.url]) == 1
    output = capsys.readouterr().err
    assert "no version is called z; stored: version 3, b (version 2), a (version 1)" in output
    store.replies["/weights/versions"] = (200, THREE | {"versions": [version(1, "a", 1)]})
    assert main(["weights", "rollback", "--yes", "--url", store.url]) == 1
    assert "no version before the current one" in capsys.readouterr().err
    assert all(path == "/weights/versions" for path, _, _ in store.requests)


@pytest.mark.parametrize(
    ("typed", "name", "status", "text"),
    [
        ("y\n", "a", 0, "Deliver a (version 1) to all workers? [y/N]"),
        ("Yes\n", "b", 0, "which is the current one,"),
        ("yes\n", "3", 0, "which was never on all workers,"),
        ("n\n", "a", 1, "cancelled"),
        ("", "a", 1, "cancelled"),
    ],
)
def test_on_a_terminal_a_rollback_needs_a_confirmation(
    store, capsys, monkeypatch, typed, name, status, text
):
    terminal = io.StringIO(typed)
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["weights", "rollback", name, "--url", store.url]) == status
    assert text in capsys.readouterr().err
    assert any(path == "/weights/rollback" for path, _, _ in store.requests) == (status == 0)


def test_without_a_terminal_yes_is_required(store, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["weights", "rollback", "--url", store.url]) == 2
    assert "pass --yes" in capsys.readouterr().err
    assert [path for path, _, _ in store.requests] == ["/weights/versions"]


def test_progress_is_printed_during_the_operation(store, capsys, monkeypatch):
    monkeypatch.setattr(weights, "POLL_SECS", 0.01)
    running = WEIGHTS["operation"] | {"path": "/weights/rollback"}
    replies = iter([WEIGHTS, {"operation": None}, {"operation": running}])
    ended = threading.Event()

    def get_weights():
        if (reply := next(replies, None)) is None:
            ended.set()
        return 200, reply or {"operation": running}

    store.replies["/weights"] = get_weights
    store.replies["/weights/rollback"] = lambda: ended.wait(20) and (200, ROLLED)
    assert main(["weights", "rollback", "--yes", "--url", store.url]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "waiting for /update_weights_from_disk: calling, 1 of 2 answered",
        "calling, 1 of 2 answered",
    ]


def test_abort_ends_the_process_group_of_a_trainer(proxy, capsys):
    body = {"status": "ok", "success": True, "message": "aborted: group 'g'", "ended": True,
            "uncertain": {A: "it may hold a part"}}  # fmt: skip
    proxy.replies["/weights/sync/abort"] = (200, body)
    assert main(["weights", "abort", "--url", proxy.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["aborted: group 'g'", f"uncertain: {A}: it may hold a part"]
