"""Calibration: the requests to the worker, and the error if it cannot be measured."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from omni_proxy.simulate.calibrate import (
    ANSWER_TOKENS,
    AT_ONCE,
    LONG_WORDS,
    NEW_WORDS,
    REPEATS,
    CalibrationError,
    measure,
)

SECS_PER_WORD, OVERHEAD_SECS = 0.0001, 0.01


class Worker(ThreadingHTTPServer):
    """Streams tokens after a delay that grows with the prompt.

    A prompt of more than `context` words is refused. `usage`: the stream ends with usage. `slots`
    are reported as llama.cpp reports them. `caches`: usage has the number of cached tokens, which
    add no delay."""

    daemon_threads = True

    def __init__(self, *, usage=True, status=200, context=10_000, slots=0, caches=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.usage, self.status, self.prompts, self.bodies = usage, status, [], []
        self.context, self.slots, self.caches = context, slots, caches
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/props" and self.server.slots:
            self._send(b'{"total_slots": %d}' % self.server.slots)
        else:
            self._send(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        server.bodies.append(body)
        if server.status != 200:
            self._send(b'{"error": "overloaded"}', server.status)
            return
        words = len(body["prompt"].split())
        if words > server.context:
            self._send(b'{"error": "too long"}', 400)
            return
        cached = self._cached(body["prompt"]) if server.caches else 0
        threading.Event().wait(OVERHEAD_SECS + (words - cached) * SECS_PER_WORD)
        self._send(b"", kind="text/event-stream")
        for _ in range(body["max_tokens"]):
            self._event({"choices": [{"text": "x"}]})
        if server.usage:
            usage = {"prompt_tokens": words, "completion_tokens": body["max_tokens"]}
            if server.caches:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _cached(self, prompt):
        earlier = (body["prompt"] for body in self.server.bodies[:-1])
        return max(
            (len(prefix.split()) for prefix in earlier if prompt.startswith(prefix)), default=0
        )

    def _event(self, fields):
        self.wfile.write(b"data: %b\n\n" % json.dumps(fields).encode())
        self.wfile.flush()

    def _send(self, body, status=200, kind="application/json"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def worker_of():
    workers = []

    def make(**options):
        worker = Worker(**options)
        threading.Thread(target=worker.serve_forever, daemon=True).start()
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.shutdown()
        worker.server_close()


def test_a_worker_is_measured_with_prompts_that_are_not_cached(worker_of):
    worker = worker_of()
    spec = measure(f"{worker.url}/")
    assert spec.prefill_tokens_per_sec > 0
    assert spec.decode_step_ms >= 0
    assert spec.decode_step_ms_per_request >= 0
    prompts = [body["prompt"] for body in worker.bodies]
    assert len(prompts) == len(set(prompts)) == 3 + REPEATS * (3 + AT_ONCE)
    assert {body["max_tokens"] for body in worker.bodies} == {ANSWER_TOKENS}
    assert {body["model"] for body in worker.bodies} == {"m"}


def test_long_prompts_are_as_long_as_the_context_allows(worker_of):
    worker = worker_of(context=200)
    assert measure(worker.url).prefill_tokens_per_sec > 0
    lengths = [len(body["prompt"].split()) for body in worker.bodies]
    assert max(length for length in lengths if length <= 200) == LONG_WORDS[-1] == 128
    assert lengths.count(LONG_WORDS[-1]) == REPEATS


def test_short_prompts_have_a_cached_prefix_if_the_worker_reports_it(worker_of):
    worker = worker_of(caches=True)
    spec = measure(worker.url)
    assert spec.prefill_overhead_ms > 0
    short_prompts = [
        body["prompt"]
        for body in worker.bodies
        if len(body["prompt"].split()) == LONG_WORDS[0] // 2 + NEW_WORDS
    ]
    assert len(short_prompts) == REPEATS
    assert len({prompt.split()[0] for prompt in short_prompts}) == 1
    assert len(worker.bodies) == 3 + REPEATS * (2 + AT_ONCE)


def test_the_number_of_llamacpp_slots_is_read(worker_of):
    spec = measure(worker_of(slots=4).url)
    assert (spec.slots, spec.max_batch) == (4, 4)
    assert measure(worker_of().url).slots == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"usage": False}, "no stream of tokens with usage at its end"),
        ({"status": 503}, 'status 503: {"error": "overloaded"}'),
    ],
)
def test_a_worker_that_cannot_be_measured_is_an_error(worker_of, options, reason):
    with pytest.raises(CalibrationError) as error:
        measure(worker_of(**options).url)
    assert reason in str(error.value)


def test_an_address_without_a_listener_is_an_error():
    with pytest.raises(CalibrationError, match="/v1/models: "):
        measure("http://127.0.0.1:9")
