import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.cli import main
from omni_proxy.cli.client.feed_model import feed_of, read_feed
from omni_proxy.cli.terminal_text import display_width
from omni_proxy.cli.top.follower import FeedStatus
from omni_proxy.cli.top.frame import render_frame, sparkline
from omni_proxy.cli.top.view import Click, TopView
from tests.cli.feeds import FEEDS, feed, point, row
from tests.example_counts import examples

URL = "http://p:1"


def frame_lines(snapshot, width=80, height=24, keys="", lost=""):
    view = TopView()
    view.show(snapshot)
    for key in keys:
        view.press(key)
    status = FeedStatus(snapshot, snapshot.history, lost, 12.0)
    return render_frame(view, status, URL, width, height).plain.split("\n")


FLEET = feed_of(
    feed(
        row("slow:1", first_p50_ms=900.0, model="m", weight_version="v1", origin="file"),
        row("good:1", first_p50_ms=100.0, model="m"),
        row("dead:1", routable=False, health="dead", why="dead: Connection refused"),
        history=[point(1, 4, first_p99_ms=900.0), point(2, 8, first_p99_ms=1800.0)],
        recent_ends=[
            {"at": "", "route": "/generate", "end": "upstream_error", "status": 502,
             "worker": "http://dead:1", "error": "connect_failure", "total_ms": 3.0},
            {"route": "/fine", "end": "completed", "status": 200},
        ],
        last_reload={"outcome": "applied", "source": "file"},
    )
)  # fmt: skip


def test_one_frame_shows_slow_and_unroutable_workers_with_reasons():
    lines = frame_lines(FLEET)
    assert len(lines) == 24
    text = "\n".join(lines)
    assert lines[0].startswith("omni-proxy 0.1.0 at http://p:1: ready")
    assert "workers   2 of 3 take requests; 1 dead" in text
    assert "reload    applied by file" in text
    assert lines[7].split()[-1] == "WHY"
    assert lines[8].startswith("dead:1  dead")
    assert lines[8].rstrip().endswith("    0  -        Connection refused")
    assert lines[9].split()[:2] == ["slow:1", "slow"]
    assert lines[9].endswith("first chunk after 900 ms…")
    assert lines[10].split()[-1] == "-"  # no problem
    assert "> dead:1 dead: Connection refused" in text
    assert "502 /generate dead:1 upstream_error connect_failure after 3.0 ms" in text
    assert "/fine" not in text
    assert lines[-2].startswith("q quit")


def test_reasons_are_complete_without_a_height_and_omitted_if_narrow():
    text = "\n".join(frame_lines(FLEET, 120, None))
    assert "first chunk after 900 ms, the others' after 100 ms" in text
    assert "Connection refused" in text
    narrow = frame_lines(FLEET, 50)
    assert not any("WHY" in line for line in narrow)
    assert not any("WHY" in line for line in frame_lines(feed_of(feed(row("good:1"))), 200))


def test_the_selected_worker_is_described_and_a_question_is_the_last_line():
    lines = frame_lines(FLEET, keys=["down"])
    text = "> slow:1 is slow: first chunk after 900 ms, the others' after 100 ms; "
    assert any(line.startswith(text) for line in lines)
    lines = frame_lines(FLEET, keys=["down", "d"])
    assert lines[-1].startswith("disable slow:1?  y: yes")


@pytest.mark.parametrize("height", range(1, 40))
def test_a_question_and_the_selected_row_are_visible_at_any_height(height):
    rows = [row(f"h{n:02}:1") for n in range(50)]
    lines = frame_lines(feed_of(feed(*rows)), height=height, keys=["end", "d"])
    assert len(lines) == height
    if height > 3:
        assert lines[-1].startswith("disable h49:1?")
        assert any(line.startswith("h49:1") for line in lines)


def test_a_small_screen_shows_the_most_important_columns():
    lines = frame_lines(FLEET, 36, 10)
    assert lines[0].split() == ["ready:", "p:1", "19:00:00"]
    head = next(line for line in lines if line.startswith("WORKER"))
    assert head.split() == ["WORKER", "STATE", "BUSY", "P99", "ERR"]
    assert lines[-2].startswith("q quit")
    assert sum(line.startswith(("dead:1", "slow:1", "good:1")) for line in lines) == 3
    sorted_by = frame_lines(FLEET, 36, 10, keys=["right"] * 6)
    assert any("P50▼" in line for line in sorted_by)
    assert frame_lines(FLEET, 12, 4)[0].startswith("ready: p:1")


def test_a_lost_connection_is_shown_above_the_last_snapshot():
    lines = frame_lines(FLEET, lost="connection refused at x")
    assert lines[1].startswith("STALE, 12 s. NOT CONNECTED, retrying: connection refused at x")
    first = render_frame(TopView(), FeedStatus(None, (), "why\x1b", 0.0), URL, 80, 24).plain
    assert first == f"omni-proxy at {URL}\nNOT CONNECTED, retrying: why\\x1b\nq quit"
    reason = "no server there; pass its address with --url URL"
    narrow = render_frame(TopView(), FeedStatus(None, (), reason, 0.0), URL, 30, 24).plain
    assert " ".join(narrow.splitlines()[1:]) == f"NOT CONNECTED, retrying: {reason} q quit"


def test_a_pause_is_shown_with_its_origin_and_end_in_80_columns():
    paused = {
        "at": "2026-11-21T18:55:00+00:00", "by": "python-httpx/0.28.1 from 127.0.0.1",
        "path": "/pause_generation", "mode": "retract",
    }  # fmt: skip
    lines = frame_lines(feed_of(feed(row(paused=paused), ready=False, reason="paused")))
    assert "end it with: omni-proxy weights continue; paused for 5" in lines[1]
    assert "by python-httpx/0.28.1 from 127.0.0.1 (/pause_generation, retract)" in lines[2]


def test_without_a_height_every_row_is_printed_but_not_the_keys():
    rows = [row(f"h{n}:1") for n in range(500)]
    lines = frame_lines(feed_of(feed(*rows)), height=None)
    assert sum(line.startswith("h") for line in lines) == 500
    assert not any("q quit" in line for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 14), (36, 8), (20, 12)])
def test_the_keys_and_the_position_are_complete_at_any_width(width, height):
    lines = frame_lines(FLEET, width, height)
    keys = next(line for line in lines if line.startswith("q quit"))
    assert keys.endswith("  1/3")
    assert "…" not in keys
    assert "? help" in keys
    help_lines = frame_lines(FLEET, width, height, keys="?")
    assert len(help_lines) == height
    assert any(line.startswith("any key goes back") for line in help_lines)


def test_a_search_is_shown_while_it_is_typed_and_after():
    assert frame_lines(FLEET, keys="/de")[-1].startswith("/de▏")
    after = frame_lines(FLEET, keys=["/", "d", "e", "enter"])
    assert after[-1] == "search: de (Esc: all)"
    assert after[-2].endswith("1/1 of 3")
    assert any(line.startswith("no worker matches zzz") for line in frame_lines(FLEET, keys="/zzz"))


def test_a_click_selects_the_row_at_its_line():
    view = TopView()
    view.show(FLEET)
    status = FeedStatus(FLEET, FLEET.history, "", 0.0)
    lines = render_frame(view, status, URL, 80, 24).plain.split("\n")
    view.press(
        Click(2, next(number for number, line in enumerate(lines) if line.startswith("good:1")))
    )
    assert view.row.name == "good:1"
    title = next(number for number, line in enumerate(lines) if line.startswith("WORKER"))
    view.press(Click(lines[title].index("BUSY"), title))
    assert "BUSY▼" in render_frame(view, status, URL, 80, 24).plain


def test_the_sorted_column_is_marked():
    assert "BUSY▼" in frame_lines(FLEET, keys=["right"] * 3)[7]
    assert "BUSY▲" in frame_lines(FLEET, keys=[*["right"] * 3, "r"])[7]


def test_sessions_have_a_column_if_there_are_any():
    with_sessions = feed_of(feed(row("a:1", sessions=3), row("b:1", sessions=12), row("c:1")))
    lines = frame_lines(with_sessions)
    (head,) = (line for line in lines if line.startswith("WORKER"))
    column = head.index("SESS") + len("SESS")
    counts = {line[:3]: line[:column].split()[-1] for line in lines if line[1:3] == ":1"}
    assert counts == {"a:1": "3", "b:1": "12", "c:1": "0"}
    assert not any("SESS" in line for line in frame_lines(FLEET))
    ordered = frame_lines(with_sessions, keys=["right"] * 4)
    assert any("SESS▼" in line for line in ordered)
    assert [line[:3] for line in ordered if line[1:3] == ":1"] == ["b:1", "a:1", "c:1"]


def test_a_sparkline_has_a_bar_for_each_value():
    assert sparkline([None, 0.0, 0.1, 100.0]) == "·▁▂█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""


@settings(max_examples=examples(50))
@given(
    FEEDS, st.integers(1, 120), st.one_of(st.none(), st.integers(1, 50)),
    st.lists(st.sampled_from(("down", "up", "d", "o", "right", "r", "end", "/", "?", "x"))),
)  # fmt: skip
def test_any_feed_renders_to_a_frame_that_fits(content, width, height, keys):
    lines = frame_lines(read_feed(json.dumps(content)), width, height, keys)
    assert height is None or len(lines) == height
    for line in lines:
        assert line.isprintable()
        assert display_width(line) <= width


def test_both_workers_of_a_request_in_two_legs_are_shown_with_roles():
    ends = [
        {"route": "/generate", "end": "upstream_error", "status": 502, "total_ms": 3.0,
         "prefill": "http://p:1", "worker": "http://d:1"},
    ]  # fmt: skip
    rows = row("p:1", role="prefill"), row("d:1", role="decode")
    lines = frame_lines(feed_of(feed(*rows, recent_ends=ends)))
    assert any("502 /generate p:1 > d:1 upstream_error after 3.0 ms" in line for line in lines)
    shown = [line.split()[:2] for line in lines]
    assert ["WORKER", "ROLE"] in shown
    assert ["p:1", "prefill"] in shown
    assert ["d:1", "decode"] in shown


def test_the_load_of_each_data_parallel_rank_is_shown():
    text = "\n".join(frame_lines(feed_of(feed(row("a:1", ranks_in_flight=(3, 0, 12))))))
    assert "  ranks 3 0 12 in flight, " in text
    assert "ranks" not in "\n".join(frame_lines(feed_of(feed(row("a:1")))))


@pytest.mark.parametrize("columns", ["", "60"])
def test_lines_for_a_pipe_are_complete_or_limited_to_columns(proxy, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    why = "dead: " + "long reason " * 20 + "end"
    proxy.replies["/feed"] = (200, feed(row(), row("b:1", routable=False, health="dead", why=why)))
    assert main(["top", "--once", "--url", proxy.url]) == 0
    out = capsys.readouterr().out
    assert ("reason end" in out) is not bool(columns)
    assert max(map(len, out.splitlines())) < (61 if columns else 500)
    assert out.splitlines()[-1].startswith("P50, P99: time to first chunk")
