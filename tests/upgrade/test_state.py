"""The state that one program hands over to the next."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.health_state import Health, HealthRecord
from omni_proxy.fleet.registry import Fleet
from omni_proxy.upgrade.state import (
    CloseIdleMessage,
    CommitMessage,
    HandoverState,
    ListenerRecord,
    ReadyMessage,
    StartedMessage,
    StateMessage,
    UnreadableMessage,
    WorkerRecord,
    decode,
    encode,
    missing_workers,
    restore_workers,
    worker_records,
)

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
names = st.text(max_size=8)
counts = st.dictionaries(names, st.integers(0, 1 << 40), max_size=3)
moments = st.datetimes(timezones=st.just(UTC))
healths = st.builds(
    HealthRecord,
    state=st.sampled_from(Health),
    since=st.none() | moments,
    consecutive_failures=st.integers(0, 99),
    last_error=st.none() | names,
    last_checked_at=st.none() | moments,
    breaker_tripped=st.booleans(),
)
records = st.builds(
    WorkerRecord,
    url=names,
    health=healths,
    cordons=st.lists(names, max_size=2).map(tuple),
    weight_label=st.none() | names,
    weight_epoch=st.integers(0, 1 << 40),
    reported_adapters=st.lists(names, max_size=2).map(tuple),
    routed=counts,
    failed=counts,
)
listeners = st.builds(
    ListenerRecord,
    addresses=st.lists(names, max_size=3).map(tuple),
    slots=st.lists(st.integers(1, 9), max_size=3).map(tuple),
)
states = st.builds(
    HandoverState,
    version=names,
    listeners=listeners,
    saved=names,
    workers=st.lists(records, max_size=3).map(tuple),
    pool_sessions=st.dictionaries(
        st.sampled_from(["prefill", "decode"]),
        st.lists(st.tuples(names, names, st.floats(0, 1e9)), max_size=2).map(tuple),
    ),
    tree_files=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    tree_seed=st.none() | st.integers(0, (1 << 64) - 1),
)
messages = (
    st.builds(StateMessage, states)
    | st.builds(StartedMessage, st.lists(st.integers(), max_size=3).map(tuple), names)
    | st.builds(ReadyMessage, st.integers(1, 1 << 22), names)
    | st.just(CommitMessage())
    | st.just(CloseIdleMessage())
)


@given(messages)
def test_a_decoded_message_equals_the_encoded_one(message):
    assert decode(encode(message)) == message


@given(states)
def test_unknown_fields_are_ignored(state):
    message = json.loads(encode(StateMessage(state)))
    message["state"] |= {"later": [1]}
    for worker in message["state"].get("workers", []):
        worker["later"] = {"x": None}
    assert decode(json.dumps(message).encode()) == StateMessage(state)


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"kind": "none"}', b'{"kind": "ready"}'])
def test_an_invalid_message_is_refused(text):
    with pytest.raises(UnreadableMessage):
        decode(text)


def fleet_of(*urls: str) -> Fleet:
    fleet = Fleet()
    specs = [
        WorkerSpec(
            url,
            model=None,
            capabilities=(),
            disabled=False,
            weight=1,
            max_inflight=0,
            origin="file",
        )
        for url in urls
    ]
    fleet.apply(specs, NOW)
    return fleet


URLS = "http://10.0.0.1:1", "http://10.0.0.2:1"


def test_a_fleet_is_restored():
    old, new = fleet_of(*URLS), fleet_of(*URLS)
    healthy, ejected = old.workers
    ejected.disabled_changed_at = NOW - timedelta(hours=2)
    for _ in range(2):
        old.observe_probe(healthy, status=200, error=None, at=NOW, epoch=0)
    healthy.add_counts("chat", routed=7, succeeded=5, failed=2)
    old.set_version(healthy, "step-7", 7)
    old.mark_dead(ejected, NOW, declared=True)
    assert restore_workers(new, worker_records(old)) == 2
    assert worker_records(new) == worker_records(old)
    assert new.workers[1].disabled_changed_at == NOW - timedelta(hours=2)
    assert [worker.routable for worker in new.workers] == [True, False]
    assert new.candidates(None, 0) == [new.workers[0]]


def test_a_worker_with_another_cordon_is_probed_again():
    old, new = fleet_of(URLS[0]), fleet_of(URLS[0])
    (worker,) = old.workers
    for _ in range(2):
        old.observe_probe(worker, status=200, error=None, at=NOW, epoch=0)
    old.cordon(worker, "unproven")
    restore_workers(new, worker_records(old))
    assert new.workers[0].health.state is Health.UNKNOWN


def test_a_removed_worker_is_left_out():
    old, new = fleet_of(*URLS), fleet_of(URLS[0])
    assert missing_workers(new, worker_records(old)) == [URLS[1]]
    assert restore_workers(new, worker_records(old)) == 1
