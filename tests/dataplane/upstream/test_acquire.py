"""Taking a worker where others may be quicker to its last place: a fleet says when they were."""

import pytest

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.upstream.acquire import CHOICES
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import SUCCEEDED
from omni_proxy.routing.disaggregation.pick_record import BURST
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import entry, fleet_of


class ContestedFleet(Fleet):
    def __init__(self):
        super().__init__()
        self.times, self.asked = 0, []

    def is_over_limit(self, worker):
        self.asked.append(worker)
        return len(self.asked) <= self.times


@pytest.fixture
async def dataplane():
    fleet = fleet_of(entry("a", max_inflight=2), entry("b", max_inflight=2), kind=ContestedFleet)
    return DataPlane(
        fleet, parse("[server]\n"), admin_socket="/nowhere", sources=Sources(lambda n: 0)
    )


def quicker(fleet, times):
    """Others take the place `times` times, and have gone again at the next choice."""
    fleet.times = times
    return fleet.asked


def request():
    exchange = Exchange(0.0, "1.1.1.1:1")
    exchange.requirements = Requirements(1)
    return exchange


async def test_a_slot_that_another_process_acquired_is_released_and_another_acquired(dataplane):
    asked = quicker(dataplane.fleet, 1)
    exchange = request()
    worker = dataplane.balancer.acquire(exchange)
    assert (len(asked), asked[1]) == (2, worker)
    counts = {each: (each.in_flight, each.peak_in_flight) for each in dataplane.fleet.workers}
    assert counts.pop(worker) == (1, 1)
    assert list(counts.values()) == [(0, 0)]
    assert (exchange.worker, exchange.attempts) == (worker, 1)
    dataplane.balancer.release(exchange, worker, SUCCEEDED)
    assert [each.in_flight for each in dataplane.fleet.workers] == [0, 0]


async def test_losing_every_race_for_a_slot_acquires_nothing_and_is_503(dataplane):
    asked = quicker(dataplane.fleet, CHOICES)
    exchange = request()
    with pytest.raises(HttpError, match="at its limit a moment ago") as reported:
        dataplane.balancer.acquire(exchange)
    assert reported.value.code == "all_full"
    assert len(asked) == CHOICES
    assert [(w.in_flight, w.peak_in_flight) for w in dataplane.fleet.workers] == [(0, 0)] * 2
    assert (exchange.worker, exchange.attempts) == (None, 0)


async def test_without_limits_no_counts_are_read_again(dataplane):
    asked = quicker(dataplane.fleet, CHOICES)
    dataplane.fleet.has_inflight_limits = False
    dataplane.balancer.acquire(request())
    assert asked == []


async def test_the_candidates_are_recorded_of_two_requests_a_second_and_of_a_first_few(dataplane):
    dataplane.recorders.meters = object()
    balancer, recorded = dataplane.balancer, []
    for number in range(400):
        exchange = request()
        exchange.started_at = 100 + number / 40
        dataplane.balancer.release(exchange, balancer.acquire(exchange), SUCCEEDED)
        recorded.append(exchange.candidates is not None)
    assert all(recorded[:BURST])
    assert sum(recorded[200:]) in (9, 10)  # in five seconds, with two workers


async def test_no_candidates_are_recorded_where_nobody_keeps_requests(dataplane):
    exchange = request()
    dataplane.balancer.acquire(exchange)
    assert exchange.candidates is None
