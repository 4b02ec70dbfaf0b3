"""Measuring a worker: what is asked of it, and what is said where it can't be measured."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from omni_proxy.simulate.calibrate import (
    ANSWER_TOKENS,
    AT_ONCE,
    REPEATS,
    CalibrationError,
    measure,
)

SECS_PER_WORD = 0.0001


class Worker(ThreadingHTTPServer):
    """Streams tokens after a time that grows with the prompt. `usage` False: it tells none."""

    daemon_threads = True

    def __init__(self, *, usage=True, status=200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.usage, self.status, self.prompts, self.bodies = usage, status, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._send(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        server.bodies.append(body)
        if server.status != 200:
            self._send(b'{"error": "overloaded"}', server.status)
            return
        words = len(body["prompt"].split())
        threading.Event().wait(words * SECS_PER_WORD)
        self._send(b"", kind="text/event-stream")
        for _ in range(body["max_tokens"]):
            self._event({"choices": [{"text": "x"}]})
        if server.usage:
            self._event({"choices": [], "usage": {"prompt_tokens": words}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, fields):
        self.wfile.write(b"data: %b\n\n" % json.dumps(fields).encode())
        self.wfile.flush()

    def _send(self, body, status=200, kind="application/json"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Nobody reads it."""


@pytest.fixture
def worker_of():
    made = []

    def make(**options):
        worker = Worker(**options)
        threading.Thread(target=worker.serve_forever, daemon=True).start()
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.shutdown()
        worker.server_close()


def test_a_worker_is_measured_with_prompts_that_no_cache_can_hold(worker_of):
    worker = worker_of()
    spec = measure(f"{worker.url}/")
    assert spec.prefill_tokens_per_sec > 0
    assert spec.decode_step_ms >= 0
    assert spec.decode_step_ms_per_request >= 0
    prompts = [body["prompt"] for body in worker.bodies]
    assert len(prompts) == len(set(prompts)) == 1 + REPEATS * (2 + AT_ONCE)
    assert {body["max_tokens"] for body in worker.bodies} == {ANSWER_TOKENS}
    assert {body["model"] for body in worker.bodies} == {"m"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"usage": False}, "no stream of tokens with usage at its end"),
        ({"status": 503}, 'status 503: {"error": "overloaded"}'),
    ],
)
def test_a_worker_that_cannot_be_measured(worker_of, options, reason):
    with pytest.raises(CalibrationError) as error:
        measure(worker_of(**options).url)
    assert reason in str(error.value)


def test_an_address_where_nothing_listens():
    with pytest.raises(CalibrationError, match="/v1/models: "):
        measure("http://127.0.0.1:9")
