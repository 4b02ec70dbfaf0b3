"""Changes of workers, as values that another proxy applies."""

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cluster.worker_changes import (
    change_of,
    changes_between,
    decode_change,
    encode_change,
    split_stored,
    with_change,
)
from omni_proxy.config.state import DisabledBy, SavedState, StateWorker, WorkerOverride

URLS = ("http://a:1", "http://b:1", "http://c:1")
EACH = st.sampled_from(URLS)
STATES = st.builds(
    SavedState,
    workers=st.lists(
        st.builds(StateWorker, url=EACH, disabled=st.booleans(), max_inflight=st.integers(0, 3)),
        unique_by=lambda worker: worker.url,
    ).map(tuple),
    switches=st.dictionaries(EACH, st.builds(WorkerOverride, disabled=st.booleans())),
    tombstones=st.dictionaries(EACH, st.sampled_from(["x", "y"])),
    leaving=st.lists(EACH, unique=True).map(tuple),
    disabled_by=st.dictionaries(EACH, st.builds(DisabledBy, by=st.sampled_from(["", "ann"]))),
)


def parts(state):
    return {url: change_of(state, url) for url in URLS}


@given(STATES, STATES)
def test_all_changes_between_two_states_lead_from_one_to_the_other(before, after):
    state = before
    for change in changes_between(before, after):
        state = with_change(state, change)
    assert parts(state) == parts(after)


@given(STATES, STATES, EACH)
def test_a_change_concerns_its_worker_alone(here, there, url):
    state = with_change(here, change_of(there, url))
    assert parts(state) == parts(here) | {url: change_of(there, url)}
    assert state.voices == here.voices


@given(STATES, EACH)
def test_a_change_survives_its_encoding(state, url):
    change = change_of(state, url)
    assert decode_change(encode_change(change)) == change
    assert split_stored(b"12:" + encode_change(change)) == (12, change)


def test_a_change_that_cannot_be_read_is_none():
    assert decode_change(b"\xc1") is None
