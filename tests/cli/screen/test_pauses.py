from omni_proxy.cli import main
from omni_proxy.cli.client.feed_model import PausedWorker, feed_of
from omni_proxy.cli.screen.diagnosis import OUT, describe_pause, diagnose, pause_lines
from omni_proxy.cli.terminal_text import parse_time
from omni_proxy.cli.top.follower import FeedStatus
from omni_proxy.cli.top.frame import render_frame
from omni_proxy.cli.top.view import TopView
from tests.cli.feeds import AT, feed, row

PAUSED = {
    "at": "2026-11-21T18:48:00+00:00", "by": "trainer from 10.0.0.3",
    "path": "/pause_generation", "mode": "retract",
}  # fmt: skip
DESCRIPTION = "paused for 12 min by trainer from 10.0.0.3 (/pause_generation, retract)"
ALL = feed(row("a:1", paused=PAUSED), row("b:1", paused=PAUSED), ready=False, reason="paused")
LINE = f"2 of 2 workers, end it with: omni-proxy weights continue; {DESCRIPTION}"


def test_a_pause_is_described_with_the_known_details():
    assert describe_pause(PausedWorker(**PAUSED), parse_time(AT)) == DESCRIPTION
    assert describe_pause(PausedWorker(), parse_time(AT)) == "paused"
    assert describe_pause(PausedWorker(by="\x1b[2J"), None) == "paused by \\x1b[2J"


def test_workers_that_share_a_pause_share_a_line():
    pauses = [PausedWorker(**PAUSED), PausedWorker(**PAUSED), PausedWorker()]
    assert list(pause_lines(pauses, 4, parse_time(AT))) == [
        f"2 of 4 workers, end it with: omni-proxy weights continue; {DESCRIPTION}",
        "1 of 4 workers, end it with: omni-proxy weights continue; paused",
    ]


def test_a_paused_fleet_is_shown_and_exits_with_1(proxy, capsys):
    proxy.replies["/feed"] = (200, ALL)
    assert main(["status", "--url", proxy.url]) == 1
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert lines[0] == f"omni-proxy 0.1.0 at {proxy.url}: NOT READY: PAUSED"
    assert "workers   0 of 2 take requests; 2 PAUSED" in lines
    assert LINE in " ".join(output.split())
    assert [line.split()[1] for line in lines if line.startswith(("a:1", "b:1"))] == ["PAUSED"] * 2


def test_a_ready_proxy_with_some_paused_workers_reports_them(proxy, capsys):
    proxy.replies["/feed"] = (200, feed(row("a:1"), row("b:1", paused=PAUSED)))
    assert main(["status", "--url", proxy.url]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 take requests; 1 PAUSED" in output
    assert "1 of 2 workers, end it with: omni-proxy weights continue; paused for 12 min" in output


def test_top_shows_a_pause_above_the_fleet_and_in_each_row():
    view = TopView()
    view.show(feed_of(ALL))
    text = render_frame(view, FeedStatus(feed_of(ALL), (), "", 0.0), "http://p:1", 200, 40).plain
    assert LINE in text
    assert text.count("PAUSED") >= 4


def test_a_pause_is_the_most_urgent_problem():
    verdicts = diagnose(feed_of(ALL))
    assert {(verdict.kind, verdict.state) for verdict in verdicts.values()} == {(OUT, "PAUSED")}


def test_weights_status_shows_a_pause(proxy, capsys):
    worker = {"worker": "http://a:1", "weight_version": "v", "weight_epoch": 1,
              "routable": True, "held_by": []}  # fmt: skip
    weights = {
        "operation": None, "waiting": [], "weight_epoch": 1, "weight_version": "v",
        "workers": [worker], "uncertain": {}, "journal": {"error": None}, "history": [],
        "paused": {"http://a:1": {**PAUSED, "at": None}},
    }  # fmt: skip
    proxy.replies["/weights"] = (200, weights)
    assert main(["weights", "status", "--url", proxy.url]) == 0
    output = capsys.readouterr().out
    assert "PAUSED: 1 of 1 workers, end it" in output
    assert "omni-proxy weights continue; paused by trainer from 10.0.0.3" in output
