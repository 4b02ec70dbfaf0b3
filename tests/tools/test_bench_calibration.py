"""tools.bench.calibration: its requests, its counts, and simulated replicas that share cores."""

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trio

from omni_proxy.simulate.engine import EngineSpec
from omni_proxy.simulate.workload import OpenLoop, Request
from tools.bench.calibration import (
    BLOCK_TOKENS,
    SYSTEM_TOKENS,
    Clients,
    Compared,
    FleetError,
    chats,
    discrepancy_reason,
    prompt_of,
    simulated,
    summary_of,
)


def all_requests(seed=1, requests=60):
    """All requests of the chats, each turn one second after the previous turn."""
    workload = chats(requests, 1.0, random.Random(seed))
    played = list(workload.requests)
    for request in played:
        played += workload.next_after(request, request.at + 1.0)
    return played


def test_a_seed_determines_the_requests_and_their_count_is_as_given():
    first, again, other = all_requests(), all_requests(), all_requests(seed=2)
    assert len(first) == 60
    assert [prompt_of(request) for request in first] == [prompt_of(request) for request in again]
    assert [prompt_of(request) for request in first] != [prompt_of(request) for request in other]


def test_prompts_share_tokens_exactly_where_they_share_blocks():
    requests = all_requests()
    for request in requests:
        assert len(prompt_of(request)) == request.input_tokens > SYSTEM_TOKENS
    for one in requests[:10]:
        for other in requests:
            blocks = shared(one.blocks, other.blocks)
            tokens = shared(prompt_of(one), prompt_of(other))
            assert tokens // BLOCK_TOKENS in (blocks, blocks - 1)


def shared(one, other):
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Engine(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        status = 200 if len(body["prompt"]) < 500 else 400
        self.send_response(status)
        self.end_headers()
        usage = {"prompt_tokens_details": {"cached_tokens": 40}}
        for event in ({"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}):
            self.wfile.write(b"data: %b\n\n" % json.dumps(event).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def engine():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def responses_to(engine, *requests):
    clients = Clients(f"http://127.0.0.1:{engine.server_port}", OpenLoop(requests))
    return trio.run(clients.run)


def test_clients_count_whole_cached_blocks(engine):
    request = Request(0.0, 100, 5, tuple(range(7)), BLOCK_TOKENS)
    result = responses_to(engine, request, request)
    assert len(result.first_secs) == len(result.total_secs) == 2
    assert (result.found_blocks, result.blocks) == (2 * 2, 2 * 7)
    body = engine.bodies[0]
    assert (body["prompt"], body["max_tokens"]) == (prompt_of(request), 5)


def test_a_request_that_fails_ends_the_run(engine):
    with pytest.raises(FleetError, match="status 400"):
        responses_to(engine, Request(0.0, 600, 5, tuple(range(40)), BLOCK_TOKENS))


def test_replicas_on_too_few_cores_take_longer():
    spec = EngineSpec(prefill_tokens_per_sec=100, decode_step_ms=1)
    requests = [Request(0.0, 100, 2, (name,), 100) for name in range(2)]
    alone = simulated(spec, OpenLoop(requests), 2, "round_robin", 2).ttft_ms["p90"]
    shared_core = simulated(spec, OpenLoop(requests), 2, "round_robin", 1).ttft_ms["p90"]
    assert alone == pytest.approx(1000)
    assert shared_core == pytest.approx(2000)


@pytest.mark.parametrize(
    ("before", "afterwards", "others", "reason"),
    [
        (100.0, 120.0, 0.1, ""),
        (100.0, 130.0, 0.0, "a prompt of 256 tokens took 1.97 s and 2.56 s"),
        (130.0, 100.0, 0.0, "a prompt of 256 tokens took 1.97 s and 2.56 s"),
        (100.0, 100.0, 0.5, "other programs used 0.50 cores"),
    ],
)
def test_a_round_on_a_busy_machine_is_marked_with_the_reason(before, afterwards, others, reason):
    specs = [EngineSpec(prefill_tokens_per_sec=rate) for rate in (before, afterwards)]
    assert discrepancy_reason(*specs, others) == reason


def test_a_round_is_within_the_bounds_by_its_first_token_and_its_hit_rate():
    rounds = [
        Compared(1.2, -5.0, ""), Compared(0.79, 0.0, ""), Compared(1.0, 5.1, "unsteady"),
    ]  # fmt: skip
    assert [each.is_within for each in rounds] == [True, False, False]
    counted = "1 of 3 rounds, 1 of them not steady, within 20% and 5 points: "
    assert f"{counted}NOT WITHIN" in summary_of(1.5, rounds)
    assert summary_of(1.5, rounds[:1]).endswith(": WITHIN")
    assert summary_of(1.5, [rounds[0], rounds[2]]).endswith("points: WITHIN")
    assert "NOT SHOWN" in summary_of(1.5, rounds[2:])
