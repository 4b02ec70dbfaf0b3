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
    """A feed that sends the events of `connections`, one list for each connection."""

    def __init__(self):
        self.connections = []
        self.requests = 0


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(follower, "RETRY_SECS", (0.01,))
    feed_server = Feed()

    class Handler(Quiet):
        def do_GET(self):
            feed_server.requests += 1
            events = feed_server.connections.pop(0) if feed_server.connections else None
            if events is None:
                self.send_error(503)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"retry: 2000\n")
            for event in events:
                text = event if isinstance(event, str) else json.dumps(event)
                self.wfile.write(f"data: {text}\n\n".encode())

    with served(Handler) as feed_server.url:
        yield feed_server


@pytest.fixture
def follow(stream):
    snapshots = threading.Event()
    created = FeedFollower(AdminTarget(stream.url), snapshots.set)

    def until(holds):
        while not holds(status := created.status()):
            assert snapshots.wait(PATIENCE_SECS), status
            snapshots.clear()
        return status

    created.until = until
    yield created
    created.stop(PATIENCE_SECS)


def test_the_last_snapshot_is_kept_with_the_history_of_all(stream, follow):
    stream.connections = [
        [feed(row(), history=[point(1), point(2)]), feed(row(), revision=4, history=[point(3)])]
    ]
    follow.start()
    status = follow.until(lambda status: status.feed and status.feed.revision == 4)
    assert [point.at for point in status.history] == [1, 2, 3]


def test_a_lost_feed_is_reported_and_reconnected_with_a_new_history(stream, follow):
    stream.connections = [
        [feed(row(), history=[point(1)])],
        [feed(row(), revision=9, history=[point(7)])],
    ]
    follow.start()
    status = follow.until(lambda status: status.feed and status.feed.revision == 9)
    assert [point.at for point in status.history] == [7]
    status = follow.until(lambda status: "omni-proxy" in status.lost)
    assert status.feed.revision == 9  # the last snapshot stays
    assert stream.requests > 2


def test_an_invalid_event_is_a_lost_feed(stream, follow):
    stream.connections = [["{}"]]
    follow.start()
    follow.until(lambda status: "not a snapshot" in status.lost)


def test_before_the_first_snapshot_the_feed_is_not_connected():
    status = FeedFollower(AdminTarget("http://127.0.0.1:1"), lambda: None).status()
    assert (status.feed, status.history, status.lost) == (None, (), "not connected yet")
