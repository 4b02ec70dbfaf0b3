import json

import pytest
from hypothesis import given, settings

from omni_proxy.cli.client.feed_model import feed_of, read_feed
from omni_proxy.cli.screen.diagnosis import (
    describe_reload,
    describe_weights,
    diagnose,
    last_minute,
    sort_by_urgency,
)
from omni_proxy.cli.terminal_text import parse_time
from tests.cli.feeds import AT, FEEDS, feed, point, row
from tests.example_counts import examples


def verdicts_of(*rows):
    snapshot = feed_of(feed(*rows))
    verdicts = diagnose(snapshot)
    return [(verdicts[row.id].kind, verdicts[row.id].state) for row in snapshot.fleet]


def test_a_worker_is_slow_compared_with_others_of_its_model():
    rows = [row(f"a:{n}", model="m", first_p50_ms=100.0) for n in range(3)]
    slow = row("b:1", model="m", first_p50_ms=250.0)
    other_model = row("c:1", model="large", first_p50_ms=900.0)
    assert verdicts_of(*rows, slow, other_model) == [
        *[("well", "ok")] * 3,
        ("slow", "slow"),
        ("well", "ok"),
    ]
    problem = diagnose(feed_of(feed(*rows, slow)))[slow["id"]].problem
    assert problem.startswith("is slow: first chunk after 250 ms, the others' after 100 ms; ")
    slow["engine_load"] = {"waiting": 12, "kv_usage": 0.97, "state": "ok", "age_secs": 1}
    problem = diagnose(feed_of(feed(*rows, slow)))[slow["id"]].problem
    assert problem.endswith("; 12 wait in its engine; its KV cache is 97% full")


def test_of_two_workers_one_can_be_slow_unless_the_difference_is_a_few_ms():
    assert verdicts_of(row(first_p50_ms=10.0), row("b:1", first_p50_ms=31.0))[1][0] == "slow"
    assert verdicts_of(row(first_p50_ms=1.0), row("b:1", first_p50_ms=9.0))[1][0] == "well"
    assert verdicts_of(row(first_p50_ms=500.0)) == [("well", "ok")]


def row_with_gap(name, millis, **fields):
    return row(name, first_p50_ms=10.0, minute={"between_p50_ms": millis}, **fields)


def test_a_worker_is_slow_by_the_time_between_its_chunks():
    slow = row_with_gap("b:1", 875.0)
    assert verdicts_of(row_with_gap("a:1", 5.0), row_with_gap("a:2", 5.0), slow)[2] == (
        "slow",
        "slow",
    )
    problem = diagnose(feed_of(feed(row_with_gap("a:1", 5.0), slow)))[slow["id"]].problem
    assert problem.startswith("is slow: 875 ms between two chunks, the others' 5.0 ms; ")
    # Adjacent buckets of the histogram count as equal; workers of other roles are not compared.
    for own, others in ((37.5, 17.5), (17.5, 5.0), (1750.0, 875.0)):
        assert verdicts_of(row_with_gap("a:1", others), row_with_gap("b:1", own))[1][0] == "well"
    assert (
        verdicts_of(
            row_with_gap("a:1", 5.0, role="prefill"), row_with_gap("b:1", 875.0, role="decode")
        )[1][0]
        == "well"
    )


def test_a_worker_with_few_responses_is_neither_slow_nor_a_reference():
    few = {"first_p50_ms": 900.0, "answers": 4}
    assert verdicts_of(row(first_p50_ms=10.0), row("b:1", **few)) == [("well", "ok")] * 2
    assert verdicts_of(row(first_p50_ms=10.0), row("b:1", **few | {"answers": 5}))[1][0] == "slow"
    quick = {"first_p50_ms": 1.0, "answers": 4}
    assert verdicts_of(row(first_p50_ms=100.0), row("b:1", **quick)) == [("well", "ok")] * 2


@pytest.mark.parametrize(
    ("fields", "kind", "state"),
    [
        ({"health": "dead", "why": "dead: Connection refused"}, "out", "dead"),
        ({"disabled": True}, "leaving", "disabled"),
        ({"drain": {"state": "draining"}, "disabled": True}, "leaving", "draining"),
        ({"held_by": ["uncertain"]}, "out", "uncertain"),
        ({"half_open": True}, "leaving", "half-open"),
    ],
)
def test_a_worker_without_requests_is_out_or_draining(fields, kind, state):
    assert verdicts_of(row(routable=False, **fields)) == [(kind, state)]


def test_a_problem_has_its_duration_if_it_is_known():
    out = row(routable=False, health="dead", why="dead: gone", since="2026-11-21T18:48:00+00:00")
    assert diagnose(feed_of(feed(out)))[out["id"]].problem == "dead: gone (for 12 min)"


def test_a_worker_with_5_percent_errors_is_failing():
    assert verdicts_of(row(rate=10.0, errors=29)) == [("well", "ok")]
    assert verdicts_of(row(rate=10.0, errors=30)) == [("failing", "failing")]


def test_silence_is_reported_before_latency():
    silent = row("a:1", in_flight=6, silent_secs=31.0, first_p50_ms=10.0, model="m")
    snapshot = feed_of(feed(silent, row("b:1", first_p50_ms=900.0, model="m")))
    first, second = diagnose(snapshot).values()
    assert (first.kind, first.state) == ("slow", "silent")
    assert first.problem == "is silent: 6 in flight, no response data for 31 s"
    assert second.state == "slow"


def test_rows_are_sorted_by_urgency_then_by_load():
    rows = [
        row("idle:1"), row("busy:1", in_flight=5), row("dead:1", routable=False, health="dead"),
        row("off:1", routable=False, disabled=True), row("bad:1", errors=9),
    ]  # fmt: skip
    snapshot = feed_of(feed(*rows))
    ordered = [row.name for row in sort_by_urgency(snapshot, diagnose(snapshot))]
    assert ordered == ["dead:1", "bad:1", "off:1", "busy:1", "idle:1"]


def test_the_last_minute_is_the_sum_of_60_points():
    points = [point(at, requests=1, errors=at % 2) for at in range(100)]
    assert last_minute(feed_of(feed(history=points)).history) == (60, 30)
    assert last_minute(()) == (0, 0)


def test_a_reload_is_described_with_its_changes():
    diff = {
        "changed": {"routing.policy": ["random", "least_request"], "x": [1, 2], "y": [1, 2]},
        "workers": {"added": ["http://b"], "removed": [], "changed": {}},
    }
    at = "2026-11-21T18:55:00+00:00"
    reload = {"outcome": "applied", "source": "file", "at": at, "diff": diff}
    assert describe_reload(reload, parse_time(AT)) == (
        "applied by file, 5 min ago: routing.policy random -> least_request; x 1 -> 2; y 1 -> 2; "
        "1 more"
    )
    assert describe_reload(None, parse_time(AT)) == "none yet"
    assert (
        describe_reload({"source": "start", "at": at}, parse_time(AT))
        == "none since the start, 5 min ago"
    )


def test_a_refused_file_is_reported_with_its_first_problem():
    hint = "did you mean `port`?"
    first = {"path": "server.prot", "line": 2, "reason": "unknown key", "hint": hint}
    problems = [first, {"path": "x"}]
    error = {"message": "m", "file": "p.toml", "problems": problems}
    reload = {"outcome": "refused", "source": "SIGHUP", "at": AT, "error": error}
    assert describe_reload(reload, parse_time(AT)) == (
        "refused by SIGHUP, 0 s ago; the previous configuration stays: "
        "p.toml line 2 server.prot: unknown key; did you mean `port`? (and 1 more)"
    )


SYNC = {
    "state": "committing",
    "owner": {"group_name": "g", "master": "h:1", "caller": "trl", "age_secs": 12.4},
    "step_secs": 3.2,
    "members": [
        {"member": "http://a", "progress": "done"},
        {"member": "http://b", "progress": "asked"},
    ],
}


def test_a_sync_is_shown_with_owner_step_and_pending_members():
    text = describe_weights(feed_of(feed(weights={"sync": SYNC})))
    assert text == (
        "sync: g at h:1 of trl, committing for 3 s, begun 12 s ago, waiting for http://b"
    )
    armed = SYNC | {"state": "armed", "members": [{"member": "http://a", "progress": "idle"}]}
    assert "armed for 3 s, begun 12 s ago, members: 1" in describe_weights(
        feed_of(feed(weights={"sync": armed}))
    )
    assert describe_weights(feed_of(feed(weights={"sync": {"state": "idle", "owner": None}}))) == ""


def test_weights_are_reported_by_their_versions():
    rows = [row("a:1", weight_version="v2", weight_epoch=2), row("b:1", weight_version="v1")]
    assert describe_weights(feed_of(feed(*rows[:1]))) == "v2 (epoch 2) on 1"
    weights = {"operation": {"path": "/update", "step": "calling"}, "uncertain": {"http://b": "x"}}
    assert describe_weights(feed_of(feed(*rows, weights=weights))) == (
        "2 versions: v1 on 1, v2 (epoch 2) on 1; running: /update, calling; uncertain: 1"
    )
    assert describe_weights(feed_of(feed(row()))) == ""


@settings(max_examples=examples(50))
@given(FEEDS)
def test_any_feed_can_be_diagnosed(content):
    snapshot = read_feed(json.dumps(content))
    verdicts = diagnose(snapshot)
    assert len(sort_by_urgency(snapshot, verdicts)) == len(snapshot.fleet)
    for text in (
        describe_reload(snapshot.last_reload, parse_time(snapshot.at)),
        describe_weights(snapshot),
    ):
        assert text.isprintable()
    for verdict in verdicts.values():
        assert f"{verdict.state}{verdict.problem}".isprintable()


def test_an_overloaded_worker_is_shown_with_the_reason_of_its_engine():
    snapshot = feed_of(feed(row("a:1", overloaded="9 requests wait in its engine"), row("b:1")))
    (first,) = (verdict for verdict in diagnose(snapshot).values() if verdict.kind != "well")
    assert (first.kind, first.state) == ("slow", "overloaded")
    assert first.problem == "is overloaded: 9 requests wait in its engine"
