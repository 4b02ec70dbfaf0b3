import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import (
    SavedState,
    WorkerSpec,
    desired_workers,
    prune_state,
    with_added,
    with_deleted,
    with_override,
    with_pending_delete,
)
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import Config, WorkerEntry
from omni_proxy.config.state import SavedVoices

A, B, C, D = (f"http://{name}" for name in "abcd")
FILE = parse(f'[[workers]]\nurl = "{A}"\nmodel = "m"\n[[workers]]\nurl = "{B}"')
LAUNCH = parse('[[launch]]\ncommand = ["run"]\nreplicas = 2\nmodel = "l"')


def from_http(url, **fields):
    plain = {
        "model": None,
        "capabilities": frozenset(CAPABILITIES),
        "disabled": False,
        "weight": 1,
        "max_inflight": 0,
        "origin": "api",
    }
    return WorkerSpec(url=url, **(plain | fields))


def urls(config, flags=(), state=SavedState()):  # noqa: B008
    return [worker.url for worker in desired_workers(config, flags, state)]


def only(config, flags=(), state=SavedState()):  # noqa: B008
    (worker,) = desired_workers(config, flags, state)
    return worker


def test_workers_are_ordered_by_origin():
    state = with_added(SavedState(), from_http(D))
    config = parse(
        f'[[launch]]\ncommand = ["run"]\nmodel = "l"\n[[workers]]\nurl = "{B}"\n'
        f'[[workers]]\nurl = "{A}"'
    )
    workers = desired_workers(config, (C,), state)
    assert [(worker.url, worker.origin) for worker in workers] == [
        (B, "file"),
        (A, "file"),
        ("http://127.0.0.1:31000", "launch"),
        (C, "flag"),
        (D, "api"),
    ]
    assert workers[2].model == "l"


def test_a_worker_in_the_file_and_in_a_flag_has_the_origin_file():
    assert [
        (worker.url, worker.origin) for worker in desired_workers(FILE, (B, C), SavedState())
    ] == [
        (A, "file"),
        (B, "file"),
        (C, "flag"),
    ]


def test_the_default_model_applies_to_workers_without_a_model():
    config = parse(f'routing.model = "r"\n[[workers]]\nurl = "{A}"\nmodel = "m"')
    state = with_added(SavedState(), from_http(D))
    assert [worker.model for worker in desired_workers(config, (C,), state)] == ["m", "r", "r"]
    assert [worker.model for worker in desired_workers(Config(), (C,), state)] == [None, None]


def test_an_override_changes_only_the_given_fields():
    state = with_override(SavedState(), A, disabled=True)
    state = with_override(state, A, capabilities={"streaming", "chat"}, max_inflight=3)
    worker, other = desired_workers(FILE, (), state)
    assert (worker.disabled, worker.model, worker.max_inflight) == (True, "m", 3)
    assert worker.capabilities == {"chat", "streaming"}
    assert not other.disabled


def test_a_model_can_be_removed_and_set():
    cleared = with_override(SavedState(), A, model=None)
    assert desired_workers(FILE, (), cleared)[0].model is None
    assert desired_workers(FILE, (), with_override(cleared, A, model="n"))[0].model == "n"


def test_an_override_survives_a_change_of_its_entry_but_not_its_removal():
    state = with_override(SavedState(), A, disabled=True)
    changed = parse(f'[[workers]]\nurl = "{A}"\nmax_inflight = 2')
    worker = only(changed, state=prune_state(state, changed))
    assert (worker.disabled, worker.max_inflight) == (True, 2)
    assert prune_state(state, Config()) == SavedState()


def test_an_override_applies_to_launched_flagged_and_added_workers():
    state = with_added(SavedState(), from_http(D))
    for url in ("http://127.0.0.1:31000", C, D):
        state = with_override(state, url, disabled=True, model=None)
    state = prune_state(state, LAUNCH, (C,))
    assert [worker.disabled for worker in desired_workers(LAUNCH, (C,), state)] == [
        True,
        False,
        True,
        True,
    ]
    assert set(prune_state(state, Config()).switches) == set()


def test_a_deleted_worker_stays_deleted_while_its_entry_is_unchanged():
    state = with_deleted(SavedState(), FILE, A)
    assert urls(FILE, state=state) == [B]
    assert urls(FILE, state=prune_state(state, FILE)) == [B]


def test_a_deleted_worker_returns_when_its_entry_changes():
    state = with_deleted(SavedState(), FILE, B)
    changed = parse(f'[[workers]]\nurl = "{B}"\ndisabled = true')
    assert urls(changed, state=state) == [B]
    assert prune_state(state, changed) == SavedState()


def test_a_deleted_worker_returns_if_its_entry_was_removed_before():
    state = prune_state(with_deleted(SavedState(), FILE, B), Config())
    assert urls(FILE, state=state) == [A, B]


def test_a_deleted_worker_returns_when_it_is_added_again():
    state = with_added(with_deleted(SavedState(), FILE, A), from_http(A, model="new"))
    worker = desired_workers(FILE, (), state)[0]
    assert (worker.url, worker.model, worker.origin) == (A, "new", "file")
    assert urls(FILE, state=with_deleted(state, FILE, A)) == [B]


def test_a_deleted_replica_does_not_delete_its_group():
    state = with_deleted(SavedState(), LAUNCH, "http://127.0.0.1:31000")
    assert urls(LAUNCH, state=prune_state(state, LAUNCH)) == ["http://127.0.0.1:31001"]


def test_a_deleted_worker_of_a_flag_stays_deleted():
    state = prune_state(with_deleted(SavedState(), Config(), C), Config(), (C,))
    assert urls(Config(), (C,), state) == []


def test_a_deleted_worker_of_file_and_flag_stays_deleted():
    state = prune_state(with_deleted(SavedState(), FILE, A), FILE, (A,))
    assert urls(FILE, (A,), state) == [B]


def test_deleting_an_added_worker_restores_the_state():
    state = with_deleted(with_added(SavedState(), from_http(D)), Config(), D)
    assert prune_state(state, Config()) == SavedState()


def test_adding_and_deleting_workers_keeps_the_known_voices():
    known = SavedState(voices=SavedVoices(owner="http://a:1", names=("anna",)))
    config = Config()
    added = with_added(known, from_http("http://b:1"))
    assert added.voices == known.voices
    assert with_deleted(added, config, "http://b:1").voices == known.voices


def test_adding_a_worker_twice_keeps_the_later_one():
    state = with_added(with_added(SavedState(), from_http(D)), from_http(D, model="m"))
    assert only(Config(), state=state).model == "m"


def test_a_worker_added_over_http_keeps_the_key_of_its_entry():
    config = parse(f'[[workers]]\nurl = "{A}"\napi_key_env = "KEY"')
    assert only(config, state=with_added(SavedState(), from_http(A))).api_key_env == "KEY"


def test_a_pending_delete_disables_a_worker_until_it_is_enabled_or_removed():
    leaving = with_pending_delete(with_pending_delete(with_added(SavedState(), from_http(D)), D), A)
    assert leaving.leaving == (D, A)
    assert {w.url: w.disabled for w in desired_workers(FILE, (), leaving)} == {
        A: True,
        B: False,
        D: True,
    }
    assert prune_state(leaving, FILE) == leaving
    assert with_pending_delete(leaving, A) == leaving
    assert with_override(leaving, A, disabled=True).leaving == (D, A)
    assert with_override(leaving, A, disabled=False).leaving == (D,)
    assert with_deleted(leaving, FILE, D).leaving == (A,)
    assert prune_state(leaving, Config()).leaving == (D,)


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "delete", "on", "off"]), st.sampled_from([A, B, C, D])),
    max_size=12,
)


@given(steps=STEPS, flags=st.sampled_from([(), (C,), (A, D)]))
def test_changes_over_http_match_a_plain_dictionary(steps, flags):
    expected = dict.fromkeys((A, B, *flags), False)
    state = SavedState()
    for step, url in steps:
        if step == "add":
            state, expected[url] = with_added(state, from_http(url)), False
        elif step == "delete":
            state = with_deleted(state, FILE, url)
            expected.pop(url, None)
        elif url in expected:
            state = with_override(state, url, disabled=step == "off")
            expected[url] = step == "off"
        state = prune_state(state, FILE, flags)
    actual = {worker.url: worker.disabled for worker in desired_workers(FILE, flags, state)}
    assert actual == expected


@pytest.mark.parametrize("field", ["model", "disabled", "max_inflight", "capabilities"])
def test_every_change_of_an_entry_is_detected(field):
    changes = {"model": "x", "disabled": True, "max_inflight": 1, "capabilities": ("chat",)}
    old = Config(workers=(WorkerEntry(url=A),))
    new = Config(workers=(WorkerEntry(url=A, **{field: changes[field]}),))
    assert urls(new, state=with_deleted(SavedState(), old, A)) == [A]
