import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import with_deleted, with_override
from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.schema import Config
from omni_proxy.config.state import (
    DisabledBy,
    KeyExists,
    KeyRefused,
    SavedState,
    StateWorker,
    WorkerOverride,
    read_saved_key,
    read_state,
    render_state,
    with_key,
    with_saved_keys,
    without_hidden_keys,
    without_key,
)
from omni_proxy.config.tables.keys import CallerKey, SavedKey

CALLERS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9)
URLS = st.integers(1, 9).map(lambda port: f"http://h:{port}")
CAPABLE = st.sets(st.sampled_from(CAPABILITIES), min_size=1).map(tuple)
WORKERS = st.builds(
    StateWorker,
    url=URLS,
    model=st.sampled_from(["", "m", 'a"b\n']),
    capabilities=CAPABLE,
    disabled=st.booleans(),
    max_inflight=st.integers(0, 9),
)
SWITCHES = st.builds(
    WorkerOverride,
    model=st.sampled_from([None, "", "m"]),
    capabilities=st.none() | CAPABLE,
    disabled=st.none() | st.booleans(),
    weight=st.none() | st.integers(1, 3),
    max_inflight=st.none() | st.integers(0, 3),
)
STATES = st.builds(
    SavedState,
    workers=st.lists(WORKERS, unique_by=lambda worker: worker.url, max_size=3).map(tuple),
    switches=st.dictionaries(URLS, SWITCHES, max_size=3),
    tombstones=st.dictionaries(URLS, st.just("0123456789abcdef"), max_size=3),
    leaving=st.lists(URLS, unique=True, max_size=3).map(tuple),
    disabled_by=st.dictionaries(URLS, st.builds(DisabledBy, by=CALLERS), max_size=2),
)


@given(STATES)
def test_a_rendered_state_can_be_read(state):
    assert read_state(render_state(state), "s.toml") == state


def test_an_empty_state_is_rendered_as_a_comment():
    assert read_state(render_state(SavedState()), "s.toml") == SavedState()
    assert all(line.startswith("#") for line in render_state(SavedState()).splitlines())


def test_the_deletion_of_a_flag_worker_is_not_saved():
    state = with_deleted(SavedState(), Config(), "http://flag")
    assert read_state(render_state(state), "s.toml") == SavedState()


def test_the_tombstone_of_a_file_worker_is_saved():
    config = parse('[[workers]]\nurl = "http://a"')
    state = with_override(with_deleted(SavedState(), config, "http://a"), "http://b", disabled=True)
    assert read_state(render_state(state), "s.toml") == state


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[workers]]\n", "s.toml:1: workers[0].url: is missing"),
        ("[[workers]]\nurl = 'unix:/a'", "s.toml:2: workers[0].url: unix: workers can be named"),
        ("[[workers]]\nurl = 'http://169.254.169.254'", "link-local"),
        ("[[workers]]\nurl = 'http://a'\n[[workers]]\nurl = 'http://A'", "duplicate worker URL"),
        ("switches.'http://a'.disabld = 1", 's.toml:1: switches."http://a".disabld: unknown key'),
        ("switches.'http://a'.disabled = 1", "expected true or false"),
        ("switches.'http://a'.model = 1", "expected a string"),
        ("switch = 1", "unknown key; did you mean `switches`?"),
        ("tombstones.a = 1", "expected a string"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_an_invalid_state_is_refused_with_its_line(text, problem):
    with pytest.raises(ConfigError) as caught:
        read_state(text, "s.toml")
    assert problem in str(caught.value)


FILE_CALLER = CallerKey(name="file", key_sha256="11" * 32)
ADDED = SavedKey(name="added", key_sha256="22" * 32, models=("m",), max_inflight=4, priority=-1)


def test_added_callers_come_after_those_of_the_file():
    config = Config(keys=(FILE_CALLER,))
    state = with_key(ADDED, SavedState(), config)
    merged = with_saved_keys(config, state)
    assert merged.keys == (FILE_CALLER, ADDED)
    assert with_saved_keys(merged, state) is merged
    assert with_saved_keys(merged, without_key(state, "added")).keys == (FILE_CALLER,)
    with pytest.raises(KeyError):
        without_key(state, "file")


def test_saved_callers_can_be_read():
    state = SavedState(keys=(ADDED, SavedKey(name="b", key_sha256="33" * 32)))
    assert read_state(render_state(state), "state") == state


@pytest.mark.parametrize("fields", [{"name": "added"}, {"key_sha256": ADDED.key_sha256}])
def test_an_entry_of_the_file_replaces_an_added_one_permanently(fields):
    entry = CallerKey(**{"name": "other", "key_sha256": "44" * 32} | fields)
    state = SavedState(keys=(ADDED,))
    with pytest.raises(KeyExists):
        with_key(ADDED, SavedState(), Config(keys=(entry,)))
    merged = with_saved_keys(Config(keys=(entry,)), state)
    assert merged.keys == (entry,)
    assert without_hidden_keys(state, merged).keys == ()


@pytest.mark.parametrize(
    ("body", "reason"),
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
def test_a_body_that_is_not_a_caller_is_refused(body, reason):
    with pytest.raises(KeyRefused, match=reason) as refused:
        read_saved_key(body)
    assert "secret" not in str(refused.value)
