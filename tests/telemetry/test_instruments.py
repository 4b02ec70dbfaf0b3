from omni_proxy.telemetry.instruments import HoldTimes
from tests.fleet.entries import entry, fleet_of


def test_a_hold_has_the_time_of_its_first_tick_until_it_ends():
    fleet = fleet_of(entry("a"), entry("b"))
    holds, worker = HoldTimes(fleet), fleet.workers[0]
    fleet.cordon(worker, "updating")
    holds.tick(10)
    fleet.cordon(worker, "uncertain")
    assert holds.of(worker) == {"updating": 10}
    holds.tick(11)
    assert holds.of(worker) == {"uncertain": 11, "updating": 10}
    fleet.uncordon(worker, "updating")
    assert holds.of(worker) == {"uncertain": 11}
    fleet.uncordon(worker, "uncertain")
    holds.tick(12)
    fleet.cordon(worker, "uncertain")
    holds.tick(13)
    assert (holds.of(worker), holds.of(fleet.workers[1])) == ({"uncertain": 13}, {})
