"""Changes of workers, encoded for other proxies to apply."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cluster.worker_changes import (
    WorkerChange,
    change_of,
    changes_between,
    decode_change,
    encode_change,
    split_stored,
    with_change,
)
from omni_proxy.config.state import (
    FLAG_FINGERPRINT,
    DisabledBy,
    SavedState,
    StateWorker,
    WorkerOverride,
)

URLS = ("http://a:1", "http://b:1", "http://c:1")
ANY_URL = st.sampled_from(URLS)
STATES = st.builds(
    SavedState,
    workers=st.lists(
        st.builds(StateWorker, url=ANY_URL, disabled=st.booleans(), max_inflight=st.integers(0, 3)),
        unique_by=lambda worker: worker.url,
    ).map(tuple),
    switches=st.dictionaries(ANY_URL, st.builds(WorkerOverride, disabled=st.booleans())),
    tombstones=st.dictionaries(ANY_URL, st.sampled_from(["x", "y"])),
    leaving=st.lists(ANY_URL, unique=True).map(tuple),
    disabled_by=st.dictionaries(ANY_URL, st.builds(DisabledBy, by=st.sampled_from(["", "ann"]))),
)


def parts(state):
    return {url: change_of(state, url) for url in URLS}


@given(STATES, STATES)
def test_all_changes_between_two_states_lead_from_one_to_the_other(before, after):
    state = before
    for change in changes_between(before, after):
        state = with_change(state, change)
    assert parts(state) == parts(after)


@given(STATES, STATES, ANY_URL)
def test_a_change_affects_its_worker_alone(local, remote, url):
    state = with_change(local, change_of(remote, url))
    assert parts(state) == parts(local) | {url: change_of(remote, url)}
    assert state.voices == local.voices


@given(STATES, ANY_URL)
def test_a_change_survives_its_encoding(state, url):
    change = change_of(state, url)
    assert decode_change(encode_change(change)) == change
    assert split_stored(b"12:" + encode_change(change)) == (12, change)


def test_an_undecodable_change_is_none():
    assert decode_change(b"\xc1") is None
    nested = b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90"  # in a field of a newer release
    assert decode_change(nested) is None
    for value in (b"", b"x:", b"-1:", b"1" * 5000 + b":"):
        assert split_stored(value) == (0, None)


@pytest.mark.parametrize(
    "change",
    [
        WorkerChange(url="not a url", added=StateWorker(url="not a url")),
        WorkerChange(url="http://a:1", added=StateWorker(url="http://b:1")),
        WorkerChange(url="HTTP://A:1", added=StateWorker(url="HTTP://A:1")),
        WorkerChange(url="unix:/run/x.sock", added=StateWorker(url="unix:/run/x.sock")),
        WorkerChange(url="http://169.254.169.254", added=StateWorker(url="http://169.254.169.254")),
        WorkerChange(url="http://a:1", added=StateWorker(url="http://a:1", weight=-1)),
        WorkerChange(url="http://a:1", switch=WorkerOverride(max_inflight=-1)),
        WorkerChange(url="x" * 1000, tombstone="y"),
    ],
)
def test_an_invalid_change_is_none(change):
    assert decode_change(encode_change(change)) is None


def test_a_configured_worker_can_be_a_unix_socket():
    for change in (
        WorkerChange(url="unix:/run/x.sock", switch=WorkerOverride(disabled=True)),
        WorkerChange(url="unix:/run/x.sock", tombstone=FLAG_FINGERPRINT, leaves=True),
    ):
        assert decode_change(encode_change(change)) == change
