"""Found workers beside those that something names, and what HTTP changes of them."""

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


def found(url: str = A, uid: str = "u1", **settings: object) -> FoundWorker:
    entry = WorkerEntry(url=url, bootstrap_port=0, **settings)  # type: ignore[arg-type]
    return FoundWorker(entry, Discovered("pods", uid, "default", f"pod-{uid}"))


def edited(state: SavedState, *there: FoundWorker, config=FILE) -> SavedState:
    """As the store saves what an edit made."""
    bound = bind_to_found(state, desired_workers(config, (), SavedState(), there), there)
    return prune_state(bound, config, (), there)


def only(state: SavedState, *there: FoundWorker, config=FILE):
    (spec,) = desired_workers(config, (), state, there)
    return spec


def test_a_found_worker_has_the_defaults_of_all_workers():
    spec = only(SavedState(), found())
    assert (spec.origin, spec.model, spec.ranks) == ("discover", "m", 1)
    assert spec.discovered == Discovered("pods", "u1", "default", "pod-u1")


def test_a_spec_follows_a_change_of_the_defaults():
    there = found()
    other = parse('[[discover]]\n[routing]\nmodel = "n"\nranks = 2\n')
    assert only(SavedState(), there).model == "m"
    spec = only(SavedState(), there, config=other)
    assert (spec.model, spec.ranks) == ("n", 2)


def test_it_changes_nothing_of_a_worker_that_something_names():
    named = parse(f'[[discover]]\n[[workers]]\nurl = "{A}"\nweight = 3\n')
    spec = only(SavedState(), found(), config=named)
    assert (spec.origin, spec.weight, spec.discovered) == ("file", 3, None)
    added = with_added(SavedState(), spec_of(StateWorker(url=A, weight=5), "api"))
    assert only(added, found()).origin == "api"
    assert [spec.origin for spec in desired_workers(FILE, (A,), SavedState(), (found(),))] == [
        "flag"
    ]


def test_a_named_worker_that_was_deleted_does_not_return_as_a_found_one():
    named = parse(f'[[discover]]\n[[workers]]\nurl = "{A}"\n')
    state = prune_state(with_deleted(SavedState(), named, A), named, (), (found(),))
    assert desired_workers(named, (), state, (found(),)) == ()


def test_a_switch_outlives_the_absence_of_its_pod_but_not_the_pod():
    state = edited(with_override(SavedState(), A, disabled=True, weight=7), found())
    assert only(state, found()).disabled
    state = prune_state(state, FILE, (), ())
    assert (only(state, found()).disabled, only(state, found()).weight) == (True, 7)
    other = found(uid="u2")
    assert not only(state, other).disabled
    assert prune_state(state, FILE, (), (other,)) == SavedState()


def test_a_deleted_one_stays_away_until_another_pod_has_its_address():
    state = edited(with_deleted(SavedState(), FILE, A), found())
    assert desired_workers(FILE, (), state, (found(),)) == ()
    assert desired_workers(FILE, (), prune_state(state, FILE), (found(),)) == ()
    assert only(state, found(uid="u2")).url == A
    assert prune_state(state, FILE, (), (found(uid="u2"),)) == SavedState()


def test_what_is_saved_of_found_workers_is_read_again():
    state = edited(with_pending_delete(SavedState(), A), found(), found(B, "u2"))
    state = edited(with_deleted(state, FILE, B), found(), found(B, "u2"))
    read = read_state(render_state(state), "state")
    assert read == state
    assert (read.leaving, len(read.tombstones)) == ((A,), 1)
    assert prune_state(read, FILE) == read  # at the start nothing is found yet


def test_without_discover_nothing_of_found_workers_is_kept():
    state = edited(with_pending_delete(SavedState(), A), found())
    assert prune_state(state, parse("")) == SavedState()


def test_a_switch_of_a_found_worker_never_holds_for_one_that_file_names_later():
    state = edited(with_override(SavedState(), A, disabled=True), found())
    named = parse(f'[[discover]]\n[[workers]]\nurl = "{A}"\n')
    assert not only(state, found(), config=named).disabled
    assert prune_state(state, named, (), (found(),)) == SavedState()


def test_what_is_kept_of_absent_workers_is_bounded():
    there = [found(f"http://10.1.{n // 250}.{n % 250}:1", f"u{n}") for n in range(MAX_ABSENT + 5)]
    state = SavedState()
    for each in there:
        state = with_override(state, each.entry.url, disabled=True)
    state = edited(state, *there)
    assert len(state.switches) == len(there)
    kept = prune_state(state, FILE)
    assert set(kept.switches) == {each.entry.url for each in there[5:]}
