import http.client
import json
import threading

import pytest

from tests.process_group.wait_helpers import wait_until
from tools.bench.data_plane.failed_legs import CAP_SECS, Engine, Rooms, cell


@pytest.fixture
def engines():
    rooms = Rooms()
    both = Engine("prefill", rooms), Engine("decode", rooms)
    both[0].other, both[1].other = both[1], both[0]
    yield both
    for engine in both:
        engine.leave()


def post(engine, path, **body):
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=10)
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def ask_in_thread(engine, **body):
    """Calls `post` in a thread; the list gets the status."""
    statuses = []
    asking = threading.Thread(target=lambda: statuses.append(post(engine, "/generate", **body)))
    asking.start()
    return asking, statuses


def test_the_engines_respond_once_both_legs_have_the_room(engines):
    prefill, decode = engines
    asking, statuses = ask_in_thread(prefill, bootstrap_room=1, rid="a")
    assert post(decode, "/generate", bootstrap_room=1, rid="a") == 200
    asking.join()
    assert statuses == [200]
    assert not prefill.rooms.held


def test_a_leg_that_waits_alone_is_held_until_aborted_by_its_rid(engines):
    prefill, _ = engines
    asking, statuses = ask_in_thread(prefill, bootstrap_room=1, rid="a-1")
    wait_until(lambda: bool(prefill.rooms.held))
    assert list(prefill.rooms.held) == [("prefill", "a-1")]
    assert post(prefill, "/abort_request", rid="b") == 200
    assert prefill.rooms.held
    assert post(prefill, "/abort_request", rid="a") == 200
    asking.join()
    assert statuses == [500]


def test_a_cell_has_the_median_and_the_maximum():
    assert cell([0.001, 0.003, 0.002]) == "2.0 (3)"
    assert cell([0.001, 0.002, CAP_SECS]) == "2.0 (> 3 s)"
    assert cell([0.001, CAP_SECS, CAP_SECS]) == "> 3 s"
    assert cell([None, None]) == ""
