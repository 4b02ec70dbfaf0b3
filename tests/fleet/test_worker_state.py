import msgspec
import pytest

from omni_proxy.fleet.health import Health
from omni_proxy.fleet.worker_state import WorkerState, entry_of, put, row_of
from tests.fleet.entries import NOW, entry, fleet_of

SETTINGS = {"model": "m", "weight": 3, "max_inflight": 7, "capabilities": frozenset(["chat"])}


def sent(row: WorkerState) -> WorkerState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=WorkerState)


def test_an_entry_made_of_a_worker_is_the_one_that_it_was_made_of():
    wanted = entry("a", **SETTINGS, disabled=True)
    worker = fleet_of(wanted).workers[0]
    assert entry_of(worker) == wanted
    assert worker.matches(entry_of(worker))


def test_a_row_survives_the_way_and_makes_another_worker_the_same():
    one = fleet_of(entry("a", **SETTINGS))
    worker = one.workers[0]
    worker.address = ("10.0.0.1", 5)
    one.hold(worker, "paused")
    one.versioned(worker, "step-7", 9)
    row = sent(row_of(worker, 4, 4))
    assert row == row_of(worker, 4, 4)
    other = fleet_of(row.entry, healthy=False).workers[0]
    assert put(other, row)
    assert not put(other, row)
    assert row_of(other, 4, 4) == row
    assert (other.routable, worker.routable) == (False, False)
    one.release(worker, "paused")
    assert put(other, sent(row_of(worker, 4, 4)))
    assert other.routable


@pytest.mark.parametrize("state", list(Health))
def test_each_state_decides_as_it_does_where_it_was_judged(state):
    worker = fleet_of(entry("a")).workers[0]
    worker.machine.state = state
    other = fleet_of(entry("a")).workers[0]
    put(other, sent(row_of(worker, 1, 1)))
    assert other.routable is worker.routable is (state is Health.HEALTHY)


def test_a_trial_that_runs_blocks_and_one_that_is_owed_does_not():
    fleet = fleet_of(entry("a"))
    worker = fleet.workers[0]
    assert not row_of(worker, 1, 1).blocked
    worker.machine.trial_owed = True
    assert (row_of(worker, 1, 1).owes, row_of(worker, 1, 1).blocked) == (True, False)
    trial = fleet.begin_trial(worker)
    row = row_of(worker, 1, 1)
    assert (row.owes, row.blocked, row.trials) == (True, True, 1)
    fleet.end_trial(worker, trial)
    assert not row_of(worker, 1, 1).blocked
    assert worker.machine.since == NOW
