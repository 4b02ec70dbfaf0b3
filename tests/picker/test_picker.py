import json

import pytest

from omni_proxy.picker.pick_request import read_selection
from omni_proxy.routing.inspect.large_json import ONE_PASS_BYTES
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import entry
from tests.picker.conftest import picker_over

ALIAS = """
[[routing.models]]
name = "gpt"
targets = [{ model = "m", weight = 1 }]
"""


def refused(fixture, body):
    with pytest.raises(HttpError) as error:
        fixture.acquire(body)
    return error.value.status, error.value.code


async def test_what_was_acquired_counts_where_the_policies_look_until_it_is_released(fixture):
    first, one = fixture.acquire()
    second, other = fixture.acquire()
    assert {one, other} == set(fixture.fleet.workers)
    assert (fixture.counts, fixture.dataplane.in_flight) == ([1, 1], 2)
    fixture.picker.release(first)
    fixture.picker.release(first)
    fixture.picker.release(second)
    assert (fixture.counts, fixture.dataplane.in_flight) == ([0, 0], 0)
    assert len(fixture.published) >= 4


async def test_a_selection_counts_nothing_and_moves_the_policy_on(fixture):
    picked = [fixture.picker.select(fixture.exchange()) for _ in range(4)]
    assert picked == [*fixture.fleet.workers] * 2
    assert fixture.counts == [0, 0]


async def test_a_bound_of_a_worker_holds_over_reservations():
    fixture = picker_over(entry("a", max_inflight=1))
    held, _ = fixture.acquire()
    assert refused(fixture, b"{}") == (503, "all_full")
    fixture.picker.release(held)
    fixture.acquire()


async def test_the_bound_of_the_fleet_holds_over_reservations():
    fixture = picker_over(entry("a"), config="[server]\nmax_inflight = 1\noverload_status = 429\n")
    held, _ = fixture.acquire()
    assert refused(fixture, b"{}") == (429, 429)
    fixture.picker.release(held)
    assert fixture.dataplane.in_flight == 0


async def test_a_model_that_no_worker_has_is_404_and_one_whose_workers_are_out_503():
    fixture = picker_over(entry("a", model="m"), entry("b", model="n", disabled=True))
    assert refused(fixture, b'{"model": "x"}') == (404, "model_not_found")
    assert refused(fixture, b'{"model": "n"}') == (503, "all_disabled")
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
    assert refused(fixture, body)[0] == status
    assert fixture.dataplane.in_flight == 0


async def test_a_worker_outside_of_a_subset_is_never_acquired(fixture):
    a, b = fixture.fleet.workers
    assert {fixture.acquire(outside={a})[1] for _ in range(5)} == {b}
    with pytest.raises(HttpError) as none_left:
        fixture.acquire(outside={a, b})
    assert none_left.value.code == "subset_unavailable"
    assert fixture.dataplane.in_flight == 5


async def test_a_session_keeps_its_worker_and_is_named_as_a_header_names_it():
    config = '[routing]\nsticky_sessions = true\nsession_headers = ["x-session-id"]\n'
    fixture = picker_over(entry("a"), entry("b"), config=config)
    named = b'{"session_id": "s"}'
    in_header = b'{"headers": {"X-Session-ID": "s"}}'
    workers = {fixture.acquire(body)[1] for body in (named, in_header) * 3}
    assert len(workers) == 1
    assert fixture.dataplane.finish_session("s")


async def test_an_alias_comes_with_the_model_that_it_stands_for():
    fixture = picker_over(entry("a", model="m"), entry("b", model="n"), config=ALIAS)
    exchange, worker = fixture.acquire(b'{"model": "gpt"}')
    assert (worker.model, exchange.requirements.target_model) == ("m", "m")


async def test_a_rank_is_acquired_with_its_worker_and_released_with_it():
    fixture = picker_over(entry("a", ranks=2))
    exchange, target = fixture.acquire()
    assert (target.in_flight, target.worker.in_flight, target.index) == (1, 1, 0)
    fixture.picker.release(exchange)
    assert (target.in_flight, target.worker.in_flight) == (0, 0)


async def test_a_large_body_is_read_in_slices_to_the_same_end(fixture):
    prompt = "x" * (ONE_PASS_BYTES + 1)
    body = json.dumps({"model": "m", "stream": True, "prompt": prompt}).encode()
    request = read_selection(body).request
    assert fixture.picker.inspect_small(request) is None
    exchange = await fixture.picker.inspect(request)
    assert (exchange.requirements.model, exchange.stream) == ("m", True)
    fixture.picker.acquire(exchange)


async def test_the_time_of_the_policies_goes_on_though_no_connection_is_served(fixture):
    fixture.clock.now += 7
    assert fixture.exchange().started_at == fixture.clock.now
    assert fixture.dataplane.loop.now == fixture.clock.now
