import msgspec
import pytest

from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import WorkerState, apply_state, worker_state
from tests.fleet.entries import NOW, entry, fleet_of

SETTINGS = {
    "model": "m",
    "weight": 3,
    "max_inflight": 7,
    "capabilities": frozenset(["chat"]),
    "role": "prefill",
    "kv_connector": "mooncake",
    "bootstrap_port": 9001,
    "ranks": "auto",
    "loras": ("l",),
}


def sent(row: WorkerState) -> WorkerState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=WorkerState)


def test_an_entry_made_of_a_worker_is_the_one_that_it_was_made_of():
    wanted = entry("a", **SETTINGS, disabled=True)
    worker = fleet_of(wanted).workers[0]
    assert worker.spec == wanted
    assert worker.matches(worker.spec)


def test_a_row_survives_the_way_and_makes_another_worker_the_same():
    one = fleet_of(entry("a", **SETTINGS))
    worker = one.workers[0]
    worker.address = ("10.0.0.1", 5)
    one.cordon(worker, "paused")
    one.set_version(worker, "step-7", 9)
    row = sent(worker_state(worker, 4, 4))
    assert row == worker_state(worker, 4, 4)
    other = fleet_of(row.entry, healthy=False).workers[0]
    assert apply_state(other, row)
    assert not apply_state(other, row)
    assert worker_state(other, 4, 4) == row
    assert (other.routable, worker.routable) == (False, False)
    one.uncordon(worker, "paused")
    assert apply_state(other, sent(worker_state(worker, 4, 4)))
    assert other.routable


@pytest.mark.parametrize("state", list(Health))
def test_each_state_decides_as_it_does_where_it_was_judged(state):
    worker = fleet_of(entry("a")).workers[0]
    worker.health.state = state
    other = fleet_of(entry("a")).workers[0]
    apply_state(other, sent(worker_state(worker, 1, 1)))
    assert other.routable is worker.routable is (state is Health.HEALTHY)


def test_a_trial_that_runs_blocks_and_one_that_is_owed_does_not():
    fleet = fleet_of(entry("a"))
    worker = fleet.workers[0]
    assert not worker_state(worker, 1, 1).half_open_taken
    worker.health.breaker_tripped = True
    assert (
        worker_state(worker, 1, 1).breaker_tripped,
        worker_state(worker, 1, 1).half_open_taken,
    ) == (True, False)
    trial = fleet.begin_half_open(worker)
    row = worker_state(worker, 1, 1)
    assert (row.breaker_tripped, row.half_open_taken, row.half_open_count) == (True, True, 1)
    fleet.end_half_open(worker, trial)
    assert not worker_state(worker, 1, 1).half_open_taken
    assert worker.health.since == NOW


def test_the_reported_role_is_shown_rather_than_the_configured_one():
    fleet = fleet_of(entry("a"))
    worker = fleet.workers[0]
    fleet.report_role(worker, "decode")
    row = sent(worker_state(worker, 1, 1))
    assert (row.entry.role, row.reported_role) == ("", "decode")
    other = fleet_of(row.entry).workers[0]
    assert apply_state(other, row)
    assert other.role == "decode"


def test_the_reported_bootstrap_port_counts_in_other_processes_as_well():
    fleet = fleet_of(entry("a", role="prefill"))
    worker = fleet.workers[0]
    before = fleet.revision
    fleet.report_bootstrap_port(worker, 9001)
    assert fleet.revision > before
    row = sent(worker_state(worker, 1, 1))
    other = fleet_of(row.entry).workers[0]
    assert (row.entry.bootstrap_port, other.bootstrap_port) == (None, None)
    assert apply_state(other, row)
    assert (other.bootstrap_port, other.needs_bootstrap_port) == (9001, True)
