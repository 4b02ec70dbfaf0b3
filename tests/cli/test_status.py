import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy import __version__
from omni_proxy.cli import main
from omni_proxy.cli.client.feed_model import feed_of, read_feed
from omni_proxy.cli.status import render_status
from omni_proxy.cli.terminal_text import display_width
from tests.cli.feeds import AT, FEEDS, feed, point, row
from tests.example_counts import examples

SINCE = "2026-11-21T18:48:00+00:00"
SNAPSHOT = feed(
    row("10.0.0.1:8000", first_p50_ms=118.0, first_p99_ms=402.0, rate=4.2, in_flight=3,
        weight_version="step-12", weight_epoch=12),
    row("10.0.0.2:8000", first_p50_ms=912.0, first_p99_ms=4210.0, rate=1.1, max_inflight=8),
    row("10.0.0.3:8000", routable=False, health="dead", since=SINCE,
        why="dead: [Errno 111] Error connecting to ('10.0.0.3', 8000): Connection refused"),
    admission={"inflight": 3, "waiting": 0},
    history=[point(100, 250, 2)],
    last_reload={"outcome": "applied", "source": "SIGHUP", "at": SINCE,
                 "diff": {"changed": {"routing.policy": ["round_robin", "random"]}}},
    config_file="/etc/omni.toml",
)  # fmt: skip


def test_one_screen_shows_slow_workers_unroutable_workers_and_the_reload(proxy, capsys):
    proxy.replies["/feed"] = (200, SNAPSHOT)
    assert main(["status", "--url", proxy.url]) == 0
    assert proxy.requests[-1][0] == "/feed?once=true"
    assert capsys.readouterr().out.splitlines() == [
        f"omni-proxy 0.1.0 at {proxy.url}: ready",
        "process   7, up 1 min, revision 3 of /etc/omni.toml",
        "workers   2 of 3 take requests; 1 dead",
        "requests  3 in flight, 0 waiting; last minute: 250 ended, 2 errors (0.8 %)",
        "policy    random",
        "reload    applied by SIGHUP, 12 min ago: routing.policy round_robin -> random",
        "weights   step-12 (epoch 12) on 1",
        "",
        "WORKER         STATE  BUSY  REQ/S     P50     P99  ERR  WEIGHTS",
        "10.0.0.3:8000  dead      0    0.0       -       -    0  -",
        "10.0.0.2:8000  slow    0/8    1.1  912 ms   4.2 s    0  -",
        "10.0.0.1:8000  ok        3    4.2  118 ms  402 ms    0  step-12",
        "P50, P99: time to first chunk; these, REQ/S and ERR: of the last minute",
        "",
        "Needs attention",
        "  10.0.0.3:8000 dead: Connection refused (for 12 min)",
        "  10.0.0.2:8000 is slow: first chunk after 912 ms, the others' after 118 ms; it",
        "    gets no more requests than they do, so its machine or engine is slow",
    ]


def test_the_last_minute_of_the_snapshot_has_precedence(proxy, capsys):
    proxy.replies["/feed"] = (200, SNAPSHOT | {"last_minute": {"requests": 251, "errors": 3}})
    assert main(["status", "--url", proxy.url]) == 0
    assert "last minute: 251 ended, 3 errors (1.2 %)" in capsys.readouterr().out


def test_token_columns_are_shown_if_counted_and_if_there_is_room():
    def minute(rate, share):
        return {
            "between_p50_ms": 62.0, "input_tokens_per_sec": 300.0, "output_tokens_per_sec": rate,
            "cache_hit_ratio": share,
        }  # fmt: skip

    rows = row("10.0.0.1:8000", minute=minute(35.2, 0.5)), row("10.0.0.2:8000", minute=minute(9, 1))
    snapshot = feed_of(feed(*rows))
    lines = render_status(snapshot, "http://p", 120)
    assert "tokens    44/s out, 600/s in; 62 ms between chunks; 75% of prompts cached" in lines
    head = next(line for line in lines if line.startswith("WORKER"))
    assert head.split()[-6:] == ["P99", "GAP", "TOK/S", "CACHE", "ERR", "WEIGHTS"]
    (first,) = (line for line in lines if line.startswith("10.0.0.1:8000"))
    assert first.split()[-6:-2] == ["62", "ms", "35", "50%"]
    narrow = render_status(snapshot, "http://p", 60)
    assert any(line.startswith("10.0.0.1:8000") for line in narrow)
    assert "TOK/S" not in "".join(narrow)
    uncounted = render_status(feed_of(feed(row("10.0.0.1:8000"))), "http://p", 120)
    assert "TOK/S" not in "".join(uncounted)
    assert not any(line.startswith("tokens") for line in uncounted)


def test_the_json_output_is_the_snapshot(proxy, capsys):
    proxy.replies["/feed"] = (200, SNAPSHOT)
    assert main(["status", "--json", "--url", proxy.url]) == 0
    assert json.loads(capsys.readouterr().out) == SNAPSHOT


def test_another_version_of_the_proxy_is_a_warning(proxy, capsys):
    proxy.replies["/feed"] = (200, {**SNAPSHOT, "version": "0.9.0"})
    assert main(["status", "--url", proxy.url]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"WARNING: the proxy runs 0.9.0, this command is {__version__}" in output


def test_not_ready_is_printed_and_exits_with_1(proxy, capsys):
    proxy.replies["/feed"] = (200, feed())
    assert main(["status", "--url", proxy.url]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"omni-proxy 0.1.0 at {proxy.url}: NOT READY\n")
    assert "omni-proxy workers add URL" in out


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            (503, {"error": {"message": "admin API is being restarted"}}),
            "admin API is being restarted",
        ),
        ((200, {"ready": True}), "not a snapshot"),
        ((404, {"detail": "Not Found"}), "is not an omni-proxy"),
    ],
)
def test_an_unreachable_proxy_exits_with_2(proxy, capsys, reply, message):
    proxy.replies["/feed"] = reply
    assert main(["status", "--url", proxy.url]) == 2
    assert message in capsys.readouterr().err


def test_problems_of_the_proxy_itself_are_shown():
    snapshot = feed(
        row(), leaving=True, metrics=False,
        last_reload={"outcome": "refused", "source": "file", "at": AT, "error": {"message": "x"}},
        supervisors=[{"name": "prober", "state": "restarting", "last_error": "OSError: no"}],
    )  # fmt: skip
    lines = render_status(feed_of(snapshot), "http://p")
    assert lines[0].endswith(": shutting down")
    assert "metrics is off" in lines[3]
    assert lines[-4:] == [
        "Needs attention",
        "  the proxy is shutting down: it finishes requests in flight",
        "  the last reload was refused: omni-proxy check lists all problems",
        "  the proxy's own prober is restarting: OSError: no",
    ]


def test_each_source_of_discovery_is_shown_with_its_problems():
    sources = [
        {"name": "pods", "state": "synced", "workers": {"open": 3, "not_ready": 1, "leaving": 0}},
        {"name": "stale-pods", "state": "stale", "error": "status 403: no", "age_secs": 61.0,
         "workers": {"open": 2}, "ignored": {"n/p": "no port"}},
        {"name": "new", "state": "failing", "error": "refused"},
    ]  # fmt: skip
    lines = render_status(feed_of(feed(row(), discovery=sources)), "http://p", 120)
    rows = [line for line in lines if line.startswith("discovery ")]
    assert rows == [
        "discovery pods synced: 3 open, 1 not ready",
        "discovery stale-pods STALE 1 min (status 403: no): 2 open; 1 ignored",
        "discovery new FAILING (refused): no workers",
    ]


@pytest.mark.parametrize(
    ("watchdog", "text"),
    [
        ({"stalls": 1, "last_stall_at": AT}, "a second or more once; last 0 s ago: its log has"),
        ({"stalls": 3, "last_stall_at": None}, "a second or more 3 times: its log has the stacks"),
    ],
)
def test_a_blocked_event_loop_is_shown(watchdog, text):
    lines = render_status(feed_of(feed(row(), watchdog=watchdog)), "http://p")
    assert text in " ".join(line.strip() for line in lines[-3:])


def test_of_many_workers_those_with_problems_are_shown_first():
    rows = [row(f"h{n}:1") for n in range(500)] + [row("gone:1", routable=False, health="dead")]
    lines = render_status(feed_of(feed(*rows)), "http://p")
    assert len(lines) < 30
    assert lines[9 - 1].startswith("gone:1")
    assert "and 489 more: 489 well (--all shows them)" in lines
    assert len(render_status(feed_of(feed(*rows)), "http://p", rows=501)) > 501


@settings(max_examples=examples(50))
@given(FEEDS, st.integers(80, 200))
def test_any_feed_renders_to_single_lines_that_fit(content, width):
    for line in render_status(read_feed(json.dumps(content)), "http://p", width):
        assert line.isprintable()
        assert display_width(line) <= width


def test_requests_refused_without_a_key_need_attention_for_a_minute():
    counts = {"refused_without_key": 1165, "refused_without_key_last_minute": 20}
    text = " ".join(map(str.strip, render_status(feed_of(feed(row(), **counts)), "http://p")))
    assert "0 errors, 20 refused without a valid key" in text
    assert "Needs attention 20 requests without a valid key refused (401)" in text
    assert "1165 since the start" in text
    later = counts | {"refused_without_key_last_minute": 0}
    assert "valid key" not in str(render_status(feed_of(feed(row(), **later)), "http://p"))
