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


def encode_and_decode(row: WorkerState) -> WorkerState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=WorkerState)


def test_the_spec_of_a_worker_is_the_one_it_was_created_with():
    spec = entry("a", **SETTINGS, disabled=True)
    worker = fleet_of(spec).workers[0]
    assert worker.spec == spec
    assert worker.matches(worker.spec)


def test_a_state_applied_in_another_process_makes_an_equal_worker():
    fleet = fleet_of(entry("a", **SETTINGS))
    worker = fleet.workers[0]
    worker.address = ("10.0.0.1", 5)
    fleet.cordon(worker, "paused")
    fleet.set_version(worker, "step-7", 9)
    row = encode_and_decode(worker_state(worker, 4, 4))
    assert row == worker_state(worker, 4, 4)
    other = fleet_of(row.entry, healthy=False).workers[0]
    assert apply_state(other, row)
    assert not apply_state(other, row)
    assert worker_state(other, 4, 4) == row
    assert (other.routable, worker.routable) == (False, False)
    fleet.uncordon(worker, "paused")
    assert apply_state(other, encode_and_decode(worker_state(worker, 4, 4)))
    assert other.routable


@pytest.mark.parametrize("state", list(Health))
def test_a_health_state_has_the_same_effect_in_other_processes(state):
    worker = fleet_of(entry("a")).workers[0]
    worker.health.state = state
    other = fleet_of(entry("a")).workers[0]
    apply_state(other, encode_and_decode(worker_state(worker, 1, 1)))
    assert other.routable is worker.routable is (state is Health.HEALTHY)


def test_the_state_has_the_breaker_and_the_half_open_request():
    fleet = fleet_of(entry("a"))
    worker = fleet.workers[0]
    assert not worker_state(worker, 1, 1).half_open_taken
    worker.health.breaker_tripped = True
    assert (
        worker_state(worker, 1, 1).breaker_tripped,
        worker_state(worker, 1, 1).half_open_taken,
    ) == (True, False)
    half_open_id = fleet.begin_half_open(worker)
    row = worker_state(worker, 1, 1)
    assert (row.breaker_tripped, row.half_open_taken, row.half_open_count) == (True, True, 1)
    fleet.end_half_open(worker, half_open_id)
    assert not worker_state(worker, 1, 1).half_open_taken
    assert worker.health.since == NOW


def test_the_reported_role_applies_in_other_processes_too():
    fleet = fleet_of(entry("a"))
    worker = fleet.workers[0]
    fleet.report_role(worker, "decode")
    row = encode_and_decode(worker_state(worker, 1, 1))
    assert (row.entry.role, row.reported_role) == ("", "decode")
    other = fleet_of(row.entry).workers[0]
    assert apply_state(other, row)
    assert other.role == "decode"


def test_the_reported_bootstrap_port_applies_in_other_processes_too():
    fleet = fleet_of(entry("a", role="prefill"))
    worker = fleet.workers[0]
    before = fleet.revision
    fleet.report_bootstrap_port(worker, 9001)
    assert fleet.revision > before
    row = encode_and_decode(worker_state(worker, 1, 1))
    other = fleet_of(row.entry).workers[0]
    assert (row.entry.bootstrap_port, other.bootstrap_port) == (None, None)
    assert apply_state(other, row)
    assert (other.bootstrap_port, other.needs_bootstrap_port) == (9001, True)
