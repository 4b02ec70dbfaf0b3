import io
import json
import sys

import pytest

from omni_proxy.cli import main
from omni_proxy.cli.explain import render_explanation

A, B = "http://a:1", "http://b:1"


def worker(url, *reasons):
    return {"url": url, "eligible": not reasons, "reasons": list(reasons), "in_flight": 2,
            "health_state": "healthy", "weight_version": None}  # fmt: skip


def explanation(**fields):
    return {
        "need": {"model": "m", "stream": True, "capabilities": ["chat", "streaming"],
                 "weights": None},
        "policy": "cache_aware", "workers": [worker(A), worker(B, "lacks chat", "disabled")],
        "pick": None, **fields,
    }  # fmt: skip


PICK = {"worker_id": "x", "url": A, "reason": "longest cached prefix",
        "text_bytes": 9, "matched_bytes": {A: 9, B: 0}}  # fmt: skip
REFUSAL = {"status": 503, "code": "no_capable_worker", "message": "none can serve it"}


def test_the_pick_is_shown_with_its_reason_and_all_verdicts():
    assert render_explanation(explanation(pick=PICK)) == [
        "needs     chat, streaming; model m",
        "policy    cache_aware",
        "goes to   http://a:1",
        "because   longest cached prefix",
        "          text_bytes: 9",
        "          matched_bytes: http://a:1: 9, http://b:1: 0",
        "",
        "WORKER      ELIGIBLE  BUSY  HEALTH   WEIGHTS  AGAINST IT",
        "http://a:1  yes          2  healthy  -        -",
        "http://b:1  no           2  healthy  -        lacks chat; disabled",
    ]


def test_a_data_parallel_rank_is_shown_behind_its_worker():
    rows = [{**worker(A), "rank": 0}, {**worker(A, "full: 2 of 2 in flight"), "rank": 1}]
    lines = render_explanation(explanation(pick={**PICK, "rank": 0}, workers=rows))
    assert lines[2] == "goes to   http://a:1 rank 0"
    assert not any("rank:" in line for line in lines)
    assert [line.split("  ")[0] for line in lines[-2:]] == [
        "http://a:1 rank 0",
        "http://a:1 rank 1",
    ]


def test_both_picks_of_a_pair_are_shown_with_the_role_of_each_worker():
    pair = [{**worker(A), "role": "decode"}, {**worker(B), "role": "prefill"}]
    prefill = {"policy": "round_robin", "reason": "", "pick": {"url": B, "reason": "its turn"}}
    assert render_explanation(explanation(pick=PICK, workers=pair, prefill=prefill))[2:] == [
        "goes to   http://a:1",
        "because   longest cached prefix",
        "          text_bytes: 9",
        "          matched_bytes: http://a:1: 9, http://b:1: 0",
        "prefill   http://b:1, by round_robin",
        "because   its turn",
        "",
        "WORKER      ROLE     ELIGIBLE  BUSY  HEALTH   WEIGHTS  AGAINST IT",
        "http://a:1  decode   yes          2  healthy  -        -",
        "http://b:1  prefill  yes          2  healthy  -        -",
    ]
    alone = {"policy": "round_robin", "reason": "enough is cached", "pick": None}
    lines = render_explanation(explanation(pick=PICK, workers=pair, prefill=alone))
    assert "prefill   no worker: enough is cached" in lines


def test_a_reason_has_no_errno():
    why = "dead ([Errno 111] Error connecting to ('10.0.0.1', 8000): Connection refused)"
    assert render_explanation(explanation(workers=[worker(B, why)]))[-1].endswith(
        "dead (Connection refused)"
    )


def test_a_refusal_is_reported_where_the_pick_would_stand():
    lines = render_explanation(explanation(refusal=REFUSAL, workers=[]))
    assert lines[2] == "no worker 503 no_capable_worker: none can serve it"
    assert lines[-1] == "there are no workers"


def test_a_body_from_a_file_is_sent_with_path_and_headers(proxy, tmp_path, capsys):
    proxy.replies["/explain"] = (200, explanation(pick=PICK))
    file = tmp_path / "request.json"
    file.write_text('{"model": "m"}')
    args = ["explain", str(file), "--path", "/v1/completions", "--header", "X-Session-Id: 7"]
    assert main([*args, "--url", proxy.url]) == 0
    assert proxy.requests[-1][:2] == ("/explain?path=/v1/completions", {"model": "m"})
    assert capsys.readouterr().out.startswith("needs")


def test_without_a_file_the_body_is_read_from_stdin(proxy, monkeypatch, capsys):
    proxy.replies["/explain"] = (200, explanation(refusal=REFUSAL))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"model": "x"}')))
    assert main(["explain", "--json", "--url", proxy.url]) == 1
    assert proxy.requests[-1][1] == {"model": "x"}
    assert json.loads(capsys.readouterr().out)["refusal"] == REFUSAL


def test_what_is_wrong_with_the_request_is_reported(proxy, tmp_path, monkeypatch, capsys):
    proxy.replies["/explain"] = (400, {"error": {"message": "invalid JSON body"}})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1")))
    assert main(["explain", "--url", proxy.url]) == 1
    assert capsys.readouterr().err == "refused with status 400: invalid JSON body\n"
    assert main(["explain", str(tmp_path / "none"), "--url", proxy.url]) == 2
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["explain", "--header", "nonsense"])
    assert caught.value.code == 2


def test_an_alias_is_shown_with_its_targets_and_the_one_that_comes():
    targets = [
        {"model": "big", "weight": 9, "available": True},
        {"model": "small", "weight": 1, "available": False},
    ]
    alias = {"name": "m", "target": "big", "reason": "next in turn by weight", "targets": targets}
    lines = render_explanation(explanation(pick=PICK, alias=alias))
    assert lines[1:3] == [
        "alias of  big (weight 9), small (weight 1, no worker for it)",
        "target    big: next in turn by weight",
    ]
    lines = render_explanation(explanation(pick=PICK, alias=alias | {"target": None}))
    assert not any(line.startswith("target") for line in lines)
