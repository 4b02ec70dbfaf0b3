import json
import threading

import pytest

from tests.http_server import Quiet, served
from tests.ports import free_run
from tools.training.endpoint import Endpoint
from tools.training.readiness import wait_ready

UP = {"status": "ready", "unknown_workers": 0, "total_workers": 2}
FACTS = {"tp_size": 1}


def answering(port, *responses):
    """A server that responds to /ready with each response in turn, then always with the last."""
    remaining = list(responses)

    class Answers(Quiet):
        def do_GET(self):
            status, body = (200, FACTS)
            if self.path == "/ready":
                status, body = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    return served(Answers, port)


@pytest.fixture
def connect():
    endpoints = []

    def at(url):
        endpoints.append(Endpoint(url, 5.0))
        return endpoints[-1]

    yield at
    for endpoint in endpoints:
        endpoint.close()


def test_the_trainer_waits_until_one_worker_serves_and_all_were_probed(connect):
    reasons = []
    none = {"reason": "no_routable_worker", "unknown_workers": 0, "total_workers": 2}
    some = {**UP, "unknown_workers": 1}
    with answering(0, (503, none), (503, none), (200, some), (200, UP)) as url:
        endpoint = connect(url)
        wait_ready(endpoint, 60, reasons.append)
    assert reasons == ["no_routable_worker", "1 of 2 workers have not been probed yet"]
    assert endpoint.calls == []


def test_the_trainer_waits_for_an_endpoint_that_does_not_listen_yet(connect):
    port, reasons = free_run(1), []
    first_report = threading.Event()

    def report(why):
        reasons.append(why)
        first_report.set()

    endpoint = connect(f"http://127.0.0.1:{port}")
    waiting = threading.Thread(target=wait_ready, args=(endpoint, 60, report))
    waiting.start()
    assert first_report.wait(30)
    with answering(port, (200, UP)):
        waiting.join(30)
        assert not waiting.is_alive()
    assert "refused" in reasons[0]


def test_an_endpoint_without_a_ready_path_is_ready_once_it_responds(connect):
    with answering(0, (404, {})) as url:
        wait_ready(connect(url), 60, pytest.fail)


def test_the_wait_ends_after_its_timeout(connect):
    reasons = []
    with pytest.raises(ValueError, match=r"is not ready after 0\.01 s"):
        wait_ready(connect(f"http://127.0.0.1:{free_run(1)}"), 0.01, reasons.append)
    assert len(reasons) <= 1


def test_a_worker_without_a_probe_result_is_not_awaited_past_the_timeout(connect):
    with answering(0, (200, {**UP, "unknown_workers": 1})) as url:
        wait_ready(connect(url), 0.01, lambda _: None)


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
def test_the_wait_ignores_workers_that_a_dead_trainer_left_out_of_rotation(connect, workers, waits):
    out = {"reason": "no_routable_worker", "unknown_workers": 0, "total_workers": 2}
    reasons = []
    with answering(0, (503, {**out, "workers": workers}), (200, UP)) as url:
        wait_ready(connect(url), 60, reasons.append)
    assert reasons == ["no_routable_worker"] * waits
