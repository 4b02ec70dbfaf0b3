"""Discovered workers, combined with configured ones and with changes over HTTP."""

from omni_proxy.config.overlay import (
    MAX_ABSENT,
    Discovered,
    FoundWorker,
    SavedState,
    bind_to_found,
    desired_workers,
    prune_state,
    read_state,
    render_state,
    spec_of,
    with_added,
    with_deleted,
    with_override,
    with_pending_delete,
)
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import WorkerEntry
from omni_proxy.config.state import StateWorker

A, B = "http://10.0.0.1:30000", "http://10.0.0.2:30000"
FILE = parse('[[discover]]\n[routing]\nmodel = "m"\n')


def found_worker(url: str = A, uid: str = "u1", **settings: object) -> FoundWorker:
    entry = WorkerEntry(url=url, bootstrap_port=0, **settings)  # type: ignore[arg-type]
    return FoundWorker(entry, Discovered("pods", uid, "default", f"pod-{uid}"))


def edited(state: SavedState, *found_workers: FoundWorker, config=FILE) -> SavedState:
    """The state that the configuration store would save after an edit."""
    bound = bind_to_found(
        state, desired_workers(config, (), SavedState(), found_workers), found_workers
    )
    return prune_state(bound, config, (), found_workers)


def only(state: SavedState, *found_workers: FoundWorker, config=FILE):
    (spec,) = desired_workers(config, (), state, found_workers)
    return spec


def test_a_found_worker_has_the_defaults_of_all_workers():
    spec = only(SavedState(), found_worker())
    assert (spec.origin, spec.model, spec.ranks) == ("discover", "m", 1)
    assert spec.discovered == Discovered("pods", "u1", "default", "pod-u1")


def test_a_spec_changes_with_the_defaults():
    worker = found_worker()
    other = parse('[[discover]]\n[routing]\nmodel = "n"\nranks = 2\n')
    assert only(SavedState(), worker).model == "m"
    spec = only(SavedState(), worker, config=other)
    assert (spec.model, spec.ranks) == ("n", 2)


def test_a_configured_worker_is_not_changed_by_discovery():
    configured = parse(f'[[discover]]\n[[workers]]\nurl = "{A}"\nweight = 3\n')
    spec = only(SavedState(), found_worker(), config=configured)
    assert (spec.origin, spec.weight, spec.discovered) == ("file", 3, None)
    added = with_added(SavedState(), spec_of(StateWorker(url=A, weight=5), "api"))
    assert only(added, found_worker()).origin == "api"
    assert [
        spec.origin for spec in desired_workers(FILE, (A,), SavedState(), (found_worker(),))
    ] == ["flag"]


def test_a_deleted_configured_worker_does_not_return_as_a_found_one():
    configured = parse(f'[[discover]]\n[[workers]]\nurl = "{A}"\n')
    state = prune_state(
        with_deleted(SavedState(), configured, A), configured, (), (found_worker(),)
    )
    assert desired_workers(configured, (), state, (found_worker(),)) == ()


def test_an_override_is_kept_while_its_pod_is_absent_but_not_for_a_new_pod():
    state = edited(with_override(SavedState(), A, disabled=True, weight=7), found_worker())
    assert only(state, found_worker()).disabled
    state = prune_state(state, FILE, (), ())
    assert (only(state, found_worker()).disabled, only(state, found_worker()).weight) == (True, 7)
    other = found_worker(uid="u2")
    assert not only(state, other).disabled
    assert prune_state(state, FILE, (), (other,)) == SavedState()


def test_a_deleted_worker_returns_only_as_another_pod():
    state = edited(with_deleted(SavedState(), FILE, A), found_worker())
    assert desired_workers(FILE, (), state, (found_worker(),)) == ()
    assert desired_workers(FILE, (), prune_state(state, FILE), (found_worker(),)) == ()
    assert only(state, found_worker(uid="u2")).url == A
    assert prune_state(state, FILE, (), (found_worker(uid="u2"),)) == SavedState()


def test_the_saved_state_of_found_workers_can_be_read():
    state = edited(with_pending_delete(SavedState(), A), found_worker(), found_worker(B, "u2"))
    state = edited(with_deleted(state, FILE, B), found_worker(), found_worker(B, "u2"))
    read = read_state(render_state(state), "state")
    assert read == state
    assert (read.leaving, len(read.tombstones)) == ((A,), 1)
    assert prune_state(read, FILE) == read  # at the start nothing is found_worker yet


def test_without_discovery_the_state_of_found_workers_is_dropped():
    state = edited(with_pending_delete(SavedState(), A), found_worker())
    assert prune_state(state, parse("")) == SavedState()


def test_an_override_of_a_found_worker_is_not_applied_to_a_configured_one():
    state = edited(with_override(SavedState(), A, disabled=True), found_worker())
    configured = parse(f'[[discover]]\n[[workers]]\nurl = "{A}"\n')
    assert not only(state, found_worker(), config=configured).disabled
    assert prune_state(state, configured, (), (found_worker(),)) == SavedState()


def test_the_state_of_absent_workers_is_bounded():
    workers = [
        found_worker(f"http://10.1.{n // 250}.{n % 250}:1", f"u{n}") for n in range(MAX_ABSENT + 5)
    ]
    state = SavedState()
    for worker in workers:
        state = with_override(state, worker.entry.url, disabled=True)
    state = edited(state, *workers)
    assert len(state.switches) == len(workers)
    kept = prune_state(state, FILE)
    assert set(kept.switches) == {worker.entry.url for worker in workers[5:]}
