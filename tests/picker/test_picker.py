import json

import msgspec
import pytest

from omni_proxy.picker.picker import head_of, read_selection
from omni_proxy.routing.inspect.large_json import ONE_PASS_BYTES
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import entry
from tests.picker.conftest import picker_over

ALIAS = """
[[routing.models]]
name = "gpt"
targets = [{ model = "m", weight = 1 }]
"""


def refusal_of(fixture, body):
    with pytest.raises(HttpError) as error:
        fixture.acquire(body)
    return error.value.status, error.value.code


async def test_an_acquired_worker_counts_as_in_flight_until_it_is_released(fixture):
    first, one = fixture.acquire()
    second, other = fixture.acquire()
    assert {one, other} == set(fixture.fleet.workers)
    assert (fixture.counts, fixture.dataplane.in_flight) == ([1, 1], 2)
    fixture.picker.release(first)
    fixture.picker.release(first)
    fixture.picker.release(second)
    assert (fixture.counts, fixture.dataplane.in_flight) == ([0, 0], 0)
    assert len(fixture.published) >= 4


async def test_a_selection_advances_the_policy_without_a_count(fixture):
    picked = [fixture.picker.select(fixture.exchange()) for _ in range(4)]
    assert picked == [*fixture.fleet.workers] * 2
    assert fixture.counts == [0, 0]


async def test_the_limit_of_a_worker_includes_reservations():
    fixture = picker_over(entry("a", max_inflight=1))
    held, _ = fixture.acquire()
    assert refusal_of(fixture, b"{}") == (503, "all_full")
    fixture.picker.release(held)
    fixture.acquire()


async def test_the_limit_of_the_fleet_includes_reservations():
    fixture = picker_over(entry("a"), config="[server]\nmax_inflight = 1\noverload_status = 429\n")
    held, _ = fixture.acquire()
    assert refusal_of(fixture, b"{}") == (429, 429)
    fixture.picker.release(held)
    assert fixture.dataplane.in_flight == 0


async def test_an_unknown_model_is_404_and_one_without_available_workers_503():
    fixture = picker_over(entry("a", model="m"), entry("b", model="n", disabled=True))
    assert refusal_of(fixture, b'{"model": "x"}') == (404, "model_not_found")
    assert refusal_of(fixture, b'{"model": "n"}') == (503, "all_disabled")
    assert fixture.acquire(b'{"model_name": "m"}')[1].model == "m"
    assert fixture.dataplane.in_flight == 1


@pytest.mark.parametrize(
    ("path", "status"), [("/workers", 404), ("/v1/audio/speech/stream", 405), ("/generate", 0)]
)
async def test_only_model_routes_have_workers(fixture, path, status):
    body = json.dumps({"path": path}).encode()
    if not status:
        fixture.acquire(body)
        return
    assert refusal_of(fixture, body)[0] == status
    assert fixture.dataplane.in_flight == 0


async def test_a_worker_outside_the_subset_is_never_acquired(fixture):
    a, b = fixture.fleet.workers
    assert {fixture.acquire(outside={a})[1] for _ in range(5)} == {b}
    with pytest.raises(HttpError) as none_left:
        fixture.acquire(outside={a, b})
    assert none_left.value.code == "subset_unavailable"
    assert fixture.dataplane.in_flight == 5


async def test_a_session_in_the_body_or_in_a_header_keeps_its_worker():
    config = '[routing]\nsticky_sessions = true\nsession_headers = ["x-session-id"]\n'
    fixture = picker_over(entry("a"), entry("b"), config=config)
    named = b'{"session_id": "s"}'
    in_header = b'{"headers": {"X-Session-ID": "s"}}'
    workers = {fixture.acquire(body)[1] for body in (named, in_header) * 3}
    assert len(workers) == 1
    assert fixture.dataplane.finish_session("s")


async def test_an_alias_is_resolved_to_its_target_model():
    fixture = picker_over(entry("a", model="m"), entry("b", model="n"), config=ALIAS)
    exchange, worker = fixture.acquire(b'{"model": "gpt"}')
    assert (worker.model, exchange.requirements.target_model) == ("m", "m")


async def test_a_rank_is_acquired_with_its_worker_and_released_with_it():
    fixture = picker_over(entry("a", ranks=2))
    exchange, target = fixture.acquire()
    assert (target.in_flight, target.worker.in_flight, target.index) == (1, 1, 0)
    fixture.picker.release(exchange)
    assert (target.in_flight, target.worker.in_flight) == (0, 0)


async def test_a_large_body_is_read_in_slices(fixture):
    prompt = "x" * (ONE_PASS_BYTES + 1)
    body = json.dumps({"model": "m", "stream": True, "prompt": prompt}).encode()
    request = read_selection(body).request
    assert fixture.picker.inspect_small(request) is None
    exchange = await fixture.picker.inspect(request)
    assert (exchange.requirements.model, exchange.stream) == ("m", True)
    fixture.picker.acquire(exchange)


async def test_the_clock_of_policies_advances_without_connections(fixture):
    fixture.clock.now += 7
    assert fixture.exchange().started_at == fixture.clock.now
    assert fixture.dataplane.loop.now == fixture.clock.now


def read(**keys):
    return read_selection(msgspec.json.encode(keys))


def test_without_a_request_the_body_itself_is_the_model_request():
    body = b'{"selection_id": "s1",  "model": "m", "token_ids": [1, 2], "lease_secs": 3}'
    selection = read_selection(body)
    assert (selection.selection_id, selection.lease_secs) == ("s1", 3)
    assert selection.request.body == body
    assert selection.request.head.log_words[2] == "/v1/chat/completions"


def test_the_request_keeps_its_bytes_and_has_its_path_and_headers():
    selection = read_selection(
        b'{"path": "/generate", "request": { "text":"x" }, "session_id": "me",'
        b' "headers": {"X-Omni-Min-Weight-Epoch": "3", "content-length": "99"}}'
    )
    request = selection.request
    assert request.body == b'{ "text":"x" }'
    assert request.session == b"me"
    assert request.head.length == len(request.body)
    assert request.head.hints == {b"min-weight-epoch": b"3"}
    assert request.head.target == b"/generate"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "not a selection"),
        (b"[]", "not a selection"),
        (b'{"lease_secs": 0}', "lease_secs"),
        (b'{"lease_secs": 1e9}', "lease_secs"),
        (b'{"lease_secs": "1"}', "lease_secs"),
        (b'{"selection_id": 1}', "selection_id"),
        (b'{"selection_id": "a\\nb"}', "selection_id"),
        (b'{"selection_id": "' + b"x" * 257 + b'"}', "selection_id"),
        (b'{"path": "generate"}', "path"),
        (b'{"headers": {"a": "b\\r\\nhost: x"}}', "line break"),
        (b'{"headers": {"a": "\\u20ac"}}', "Latin-1"),
        (b'{"headers": {"a b": "c"}}', ""),
    ],
)
def test_a_wrong_selection_is_refused_by_the_name_of_its_key(body, named):
    with pytest.raises(HttpError) as refused:
        read_selection(body)
    assert refused.value.status == 400
    assert named in refused.value.message


def test_an_empty_body_selects_any_worker():
    assert read_selection(b"").request.body == b""
    assert read(model_name="m").request.model == "m"


def test_the_content_type_of_a_head_is_kept():
    assert head_of("POST", "/x", {"Content-Type": "text/plain"}, 0).content_type == b"text/plain"
