"""Acquiring a worker while other processes compete for its last slot."""

import pytest

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.upstream.balancer import CHOICES
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import SUCCEEDED
from omni_proxy.routing.disaggregation.explanation import BURST
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import entry, fleet_of


class ContestedFleet(Fleet):
    """Reports a lost race for the first `times` acquired slots."""

    def __init__(self):
        super().__init__()
        self.times, self.checked = 0, []

    def is_over_limit(self, worker):
        self.checked.append(worker)
        return len(self.checked) <= self.times


@pytest.fixture
async def dataplane():
    fleet = fleet_of(entry("a", max_inflight=2), entry("b", max_inflight=2), kind=ContestedFleet)
    return DataPlane(
        fleet, parse("[server]\n"), admin_socket="/nowhere", sources=Sources(lambda n: 0)
    )


def lose_races(fleet, times):
    """Another process takes the slot first, and releases it before the next choice."""
    fleet.times = times
    return fleet.checked


def request():
    exchange = Exchange(0.0, "1.1.1.1:1")
    exchange.requirements = Requirements(1)
    return exchange


async def test_a_slot_that_another_process_acquired_is_released_and_another_acquired(dataplane):
    checked = lose_races(dataplane.fleet, 1)
    exchange = request()
    worker = dataplane.balancer.acquire(exchange)
    assert (len(checked), checked[1]) == (2, worker)
    counts = {other: (other.in_flight, other.peak_in_flight) for other in dataplane.fleet.workers}
    assert counts.pop(worker) == (1, 1)
    assert list(counts.values()) == [(0, 0)]
    assert (exchange.worker, exchange.attempts) == (worker, 1)
    dataplane.balancer.release(exchange, worker, SUCCEEDED)
    assert [worker.in_flight for worker in dataplane.fleet.workers] == [0, 0]


async def test_losing_every_race_for_a_slot_acquires_nothing_and_is_503(dataplane):
    checked = lose_races(dataplane.fleet, CHOICES)
    exchange = request()
    with pytest.raises(HttpError, match="at its limit a moment ago") as raised:
        dataplane.balancer.acquire(exchange)
    assert raised.value.code == "all_full"
    assert len(checked) == CHOICES
    assert [(w.in_flight, w.peak_in_flight) for w in dataplane.fleet.workers] == [(0, 0)] * 2
    assert (exchange.worker, exchange.attempts) == (None, 0)


async def test_without_limits_no_counts_are_checked_again(dataplane):
    checked = lose_races(dataplane.fleet, CHOICES)
    dataplane.fleet.has_inflight_limits = False
    dataplane.balancer.acquire(request())
    assert checked == []


async def test_candidates_are_recorded_for_a_first_burst_and_then_two_requests_a_second(dataplane):
    dataplane.recorders.meters = object()
    balancer, recorded = dataplane.balancer, []
    for number in range(400):
        exchange = request()
        exchange.started_at = 100 + number / 40
        dataplane.balancer.release(exchange, balancer.acquire(exchange), SUCCEEDED)
        recorded.append(exchange.candidates is not None)
    assert all(recorded[:BURST])
    assert sum(recorded[200:]) in (9, 10)  # in five seconds, with two workers


async def test_no_candidates_are_recorded_without_meters(dataplane):
    exchange = request()
    dataplane.balancer.acquire(exchange)
    assert exchange.candidates is None
