import json
import threading

import pytest

from tests.http_server import Quiet, served
from tests.ports import free_run
from tools.training.endpoint import Endpoint
from tools.training.readiness import wait_ready

UP = {"status": "ready", "unknown_workers": 0, "total_workers": 2}
FACTS = {"tp_size": 1}


def answering(port, *message):
    """Each question of /ready gets the next of these; the last one stays."""
    left = list(message)

    class Answers(Quiet):
        def do_GET(self):
            status, body = (200, FACTS)
            if self.path == "/ready":
                status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    return served(Answers, port)


@pytest.fixture
def asked():
    made = []

    def at(url):
        made.append(Endpoint(url, 5.0))
        return made[-1]

    yield at
    for endpoint in made:
        endpoint.close()


def test_it_waits_until_one_worker_serves_and_all_were_probed(asked):
    reported = []
    none = {"reason": "no_routable_worker", "unknown_workers": 0, "total_workers": 2}
    some = {**UP, "unknown_workers": 1}
    with answering(0, (503, none), (503, none), (200, some), (200, UP)) as url:
        endpoint = asked(url)
        wait_ready(endpoint, 60, reported.append)
    assert reported == ["no_routable_worker", "1 of 2 workers have not been probed yet"]
    assert endpoint.calls == []


def test_it_waits_for_an_endpoint_that_does_not_listen_yet(asked):
    port, reported = free_run(1), []
    began = threading.Event()

    def tell(why):
        reported.append(why)
        began.set()

    endpoint = asked(f"http://127.0.0.1:{port}")
    waiting = threading.Thread(target=wait_ready, args=(endpoint, 60, tell))
    waiting.start()
    assert began.wait(30)
    with answering(port, (200, UP)):
        waiting.join(30)
        assert not waiting.is_alive()
    assert "refused" in reported[0]


def test_an_endpoint_without_that_path_is_ready_once_it_reports_its_facts(asked):
    with answering(0, (404, {})) as url:
        wait_ready(asked(url), 60, pytest.fail)


def test_its_patience_ends(asked):
    reported = []
    with pytest.raises(ValueError, match=r"is not ready after 0\.01 s"):
        wait_ready(asked(f"http://127.0.0.1:{free_run(1)}"), 0.01, reported.append)
    assert len(reported) <= 1


def test_a_worker_without_a_probe_result_is_not_awaited_past_the_timeout(asked):
    with answering(0, (200, {**UP, "unknown_workers": 1})) as url:
        wait_ready(asked(url), 0.01, lambda _: None)


def held(*reasons, state="healthy", disabled=False):
    return {"health_state": state, "disabled": disabled, "held_by": list(reasons)}


@pytest.mark.parametrize(
    ("workers", "waits"),
    [
        ([held("paused"), held("paused", "uncertain")], False),
        ([held("uncertain"), held(state="dead")], False),
        ([held("paused"), held("catching_up")], True),
        ([held("paused"), held(disabled=True)], False),
        ([held(disabled=True)], True),
        ([held(state="unhealthy")], True),
        ([], True),
        (None, True),
    ],
)
def test_it_does_not_wait_for_what_a_dead_trainer_has_left_out(asked, workers, waits):
    out = {"reason": "no_routable_worker", "unknown_workers": 0, "total_workers": 2}
    reported = []
    with answering(0, (503, {**out, "workers": workers}), (200, UP)) as url:
        wait_ready(asked(url), 60, reported.append)
    assert reported == ["no_routable_worker"] * waits
