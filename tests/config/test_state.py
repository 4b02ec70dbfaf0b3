import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import with_deleted, with_override
from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.schema import Config
from omni_proxy.config.state import (
    DisabledBy,
    SavedState,
    StateWorker,
    WorkerOverride,
    read_state,
    render_state,
)

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
def test_what_was_written_reads_back(state):
    assert read_state(render_state(state), "s.toml") == state


def test_a_state_without_content_is_a_comment():
    assert read_state(render_state(SavedState()), "s.toml") == SavedState()
    assert all(line.startswith("#") for line in render_state(SavedState()).splitlines())


def test_a_deleted_flag_worker_is_forgotten_with_the_program():
    state = with_deleted(SavedState(), Config(), "http://flag")
    assert read_state(render_state(state), "s.toml") == SavedState()


def test_a_tombstone_over_file_is_kept():
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
def test_a_broken_state_is_refused_with_its_place(text, problem):
    with pytest.raises(ConfigError) as caught:
        read_state(text, "s.toml")
    assert problem in str(caught.value)
