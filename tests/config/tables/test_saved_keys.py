import pytest

from omni_proxy.config.api_keys import CallerKey, SavedKey
from omni_proxy.config.schema import Config
from omni_proxy.config.state import SavedState, read_state, render_state
from omni_proxy.config.tables.saved_keys import (
    KeyKnown,
    KeyRefused,
    read_saved_key,
    with_key,
    with_saved_keys,
    without_hidden_keys,
    without_key,
)

OF_FILE = CallerKey(name="file", key_sha256="11" * 32)
ADDED = SavedKey(name="added", key_sha256="22" * 32, models=("m",), max_inflight=4, priority=-1)


def test_added_callers_stand_behind_those_of_the_file():
    config = Config(keys=(OF_FILE,))
    state = with_key(ADDED, SavedState(), config)
    merged = with_saved_keys(config, state)
    assert merged.keys == (OF_FILE, ADDED)
    assert with_saved_keys(merged, state) is merged
    assert with_saved_keys(merged, without_key(state, "added")).keys == (OF_FILE,)
    with pytest.raises(KeyError):
        without_key(state, "file")


def test_they_are_the_same_after_they_were_saved():
    state = SavedState(keys=(ADDED, SavedKey(name="b", key_sha256="33" * 32)))
    assert read_state(render_state(state), "state") == state


@pytest.mark.parametrize("same", [{"name": "added"}, {"key_sha256": ADDED.key_sha256}])
def test_an_entry_of_the_file_hides_the_added_one_for_good(same):
    entry = CallerKey(**{"name": "other", "key_sha256": "44" * 32} | same)
    state = SavedState(keys=(ADDED,))
    with pytest.raises(KeyKnown):
        with_key(ADDED, SavedState(), Config(keys=(entry,)))
    merged = with_saved_keys(Config(keys=(entry,)), state)
    assert merged.keys == (entry,)
    assert without_hidden_keys(state, merged).keys == ()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": "a"}, "key_sha256 is missing"),
        ({"key_sha256": "11" * 32}, "name: "),
        ({"name": "a b", "key_sha256": "11" * 32}, "letters"),
        ({"name": "a", "key_sha256": "short"}, "64 hex digits"),
        ({"name": "a", "key_env": "A"}, "key_sha256 is missing"),
        ({"name": "a", "key_sha256": "11" * 32, "key_file": "/f"}, "only as key_sha256"),
        ({"name": "a", "key": "secret"}, "key"),
        ({"name": "a", "key_sha256": "11" * 32, "max_inflight": -1}, "max_inflight"),
    ],
)
def test_a_body_that_is_no_caller_is_refused(body, words):
    with pytest.raises(KeyRefused, match=words) as refused:
        read_saved_key(body)
    assert "secret" not in str(refused.value)
