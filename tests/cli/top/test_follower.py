import json
import threading

import pytest

from omni_proxy.cli.client.admin_client import AdminTarget
from omni_proxy.cli.top import follower
from omni_proxy.cli.top.follower import FeedFollower
from tests.cli.feeds import feed, point, row
from tests.http_server import Quiet, served

PATIENCE_SECS = 60


class Feed:
    """A feed that says what it is told to say, then ends."""

    def __init__(self):
        self.connections = []
        self.asked = 0


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(follower, "RETRY_SECS", (0.01,))
    made = Feed()

    class Answers(Quiet):
        def do_GET(self):
            made.asked += 1
            events = made.connections.pop(0) if made.connections else None
            if events is None:
                self.send_error(503)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"retry: 2000\n")
            for event in events:
                text = event if isinstance(event, str) else json.dumps(event)
                self.wfile.write(f"data: {text}\n\n".encode())

    with served(Answers) as made.url:
        yield made


@pytest.fixture
def listening(stream):
    snapshots = threading.Event()
    listener = FeedFollower(AdminTarget(stream.url), snapshots.set)

    def until(holds):
        while not holds(heard := listener.status()):
            assert snapshots.wait(PATIENCE_SECS), heard
            snapshots.clear()
        return heard

    listener.until = until
    yield listener
    listener.stop(PATIENCE_SECS)


def test_pictures_are_kept_with_the_history_of_all_of_them(stream, listening):
    stream.connections = [
        [feed(row(), history=[point(1), point(2)]), feed(row(), revision=4, history=[point(3)])]
    ]
    listening.start()
    heard = listening.until(lambda heard: heard.feed and heard.feed.revision == 4)
    assert [each.at for each in heard.history] == [1, 2, 3]


def test_a_lost_feed_is_reported_and_followed_again_with_its_whole_history(stream, listening):
    stream.connections = [
        [feed(row(), history=[point(1)])],
        [feed(row(), revision=9, history=[point(7)])],
    ]
    listening.start()
    heard = listening.until(lambda heard: heard.feed and heard.feed.revision == 9)
    assert [each.at for each in heard.history] == [7]
    heard = listening.until(lambda heard: "omni-proxy" in heard.lost)
    assert heard.feed.revision == 9  # the last picture stays
    assert stream.asked > 2


def test_nonsense_in_the_feed_is_a_lost_feed(stream, listening):
    stream.connections = [["{}"]]
    listening.start()
    listening.until(lambda heard: "not a snapshot" in heard.lost)


def test_before_the_first_snapshot_it_shows_that():
    heard = FeedFollower(AdminTarget("http://127.0.0.1:1"), lambda: None).status()
    assert (heard.feed, heard.history, heard.lost) == (None, (), "not connected yet")
