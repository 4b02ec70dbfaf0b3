import json

import pytest

from omni_proxy.cli import main

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


def summed(url, checksum):
    data = {"per_gpu_checksum": checksum}
    return entry(url, status_code=200, body={"results": [{"stage": "t", "data": data}]})


def test_status_is_a_table_of_the_workers_and_what_runs(proxy, capsys):
    proxy.says["/weights"] = (200, WEIGHTS)
    assert main(["weights", "status", "--url", proxy.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "under way: /update_weights_from_disk for 12 s, calling, 1 of 2 answered; waiting: 0"
    )
    assert lines[1] == "newest: epoch 3, version v3"
    assert [line.split() for line in lines[2:5]] == [
        ["WORKER", "VERSION", "EPOCH", "ROUTABLE", "HELD", "BY"],
        [A, "v3", "3", "yes", "-"],
        [B, "-", "0", "no", "uncertain,", "updating"],
    ]
    assert lines[5] == f"uncertain: {B}: it died"
    assert lines[6] == "2026-11-21T10:00:00 /pause_generation 0.5 s: 200 ok"


def test_status_tells_whose_sync_is_there(proxy, capsys):
    owner = {"group_name": "g", "master": "h:1", "caller": "", "age_secs": 9.0}
    sync = {"state": "arming", "owner": owner, "step_secs": 1.0,
            "members": [{"member": A, "progress": "asked"}]}  # fmt: skip
    proxy.says["/weights"] = (200, WEIGHTS | {"sync": sync})
    assert main(["weights", "status", "--url", proxy.url]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line == f"sync: g at h:1, arming for 1 s, begun 9 s ago, waiting for {A}"


def test_status_for_machines_is_the_answer_itself(proxy, capsys):
    proxy.says["/weights"] = (200, WEIGHTS)
    assert main(["weights", "status", "--url", proxy.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == WEIGHTS


@pytest.mark.parametrize(
    ("words", "path", "body"),
    [
        (["pause"], "/pause_generation", {"mode": "retract"}),
        (["pause", "--mode", "abort", "--selector", "model=m"],
         "/pause_generation?selector=model%3Dm", {"mode": "abort"}),
        (["continue"], "/continue_generation", {}),
        (["checksum"], "/weights_checker", {"action": "checksum"}),
        (["resolve"], "/weights/resolve", {"acknowledge": True}),
    ],
)  # fmt: skip
def test_each_command_asks_its_route_with_the_key(proxy, words, path, body):
    told = {"message": "ok", "results": [], "resolved_worker_ids": []}
    proxy.says[path.partition("?")[0]] = (200, told)
    assert main(["weights", *words, "--url", proxy.url, "--api-key", "k"]) == 0
    assert proxy.asked[-1] == (path, body, "Bearer k")


def test_who_failed_is_in_the_table_with_what_became_of_it(proxy, capsys):
    lost = entry(B, success=False, error="ReadError", standing="uncertain")
    refused = entry(A, success=False, status_code=400, body={"message": "no"})
    told = {"message": "one or more", "results": [refused, lost]}
    proxy.says["/pause_generation"] = (502, told)
    assert main(["weights", "pause", "--url", proxy.url]) == 1
    out = capsys.readouterr().out
    assert "status 400: no" in out
    assert "ReadError (uncertain)" in out


@pytest.mark.parametrize(
    ("sums", "status", "words", "standings"),
    [
        (("x", "x"), 0, "no two workers that could be compared differ", ("checked", "checked")),
        (("x", "y"), 1, "the weights differ", ("mismatched", "mismatched")),
        (("x", None), 0, "nothing could be compared", ("unverified", "unverified")),
    ],
)
def test_checksums_are_compared(proxy, capsys, sums, status, words, standings):
    found = [summed(url, each) for url, each in zip((A, B), sums, strict=True)]
    proxy.says["/weights_checker"] = (200, {"message": "ok", "results": found})
    assert main(["weights", "checksum", "--url", proxy.url]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == words
    assert tuple(line.split()[1] for line in lines[2:]) == standings


def test_a_refusal_is_told_and_is_a_failure(proxy, capsys):
    proxy.says["/weights/resolve"] = (401, {"error": {"message": "Admin API key required"}})
    assert main(["weights", "resolve", "--url", proxy.url]) == 1
    assert "status 401: Admin API key required" in capsys.readouterr().err


def test_who_stays_out_is_told(proxy, capsys):
    told = {"resolved_worker_ids": ["a"], "unresolved": {B: "ReadError"}}
    proxy.says["/weights/resolve"] = (502, told)
    assert main(["weights", "resolve", "--url", proxy.url]) == 1
    assert capsys.readouterr().out.splitlines() == ["back: a", f"still out: {B}: ReadError"]


def test_the_place_and_the_key_come_from_the_file(proxy, tmp_path):
    port = proxy.url.rpartition(":")[2]
    file = tmp_path / "proxy.toml"
    file.write_text(f'[server]\nhost = "0.0.0.0"\nport = {port}\n[admin]\napi_key = "secret"\n')
    proxy.says["/weights"] = (200, WEIGHTS)
    assert main(["weights", "status", "--config", str(file)]) == 0
    assert proxy.asked[-1] == ("/weights", None, "Bearer secret")


def test_what_cannot_be_asked_is_status_2(proxy, tmp_path, capsys):
    assert main(["weights", "status", "--url", "http://127.0.0.1:1"]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err
    proxy.says["/weights"] = (200, b"<html>")
    assert main(["weights", "status", "--url", proxy.url]) == 2
    file = tmp_path / "proxy.toml"
    file.write_text("[server]\nprot = 1\n")
    assert main(["weights", "status", "--config", str(file)]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["weights", "undo"])
    assert caught.value.code == 2
