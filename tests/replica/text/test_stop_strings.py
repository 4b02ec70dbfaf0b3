import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.text.stop_strings import StopStrings

texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def naive_cut(text, stops):
    """A naive implementation, which checks every prefix of the text, shortest first."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def split_at(text, positions):
    edges = [0, *sorted(min(position, len(text)) for position in positions), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]


@given(texts, stop_lists, st.lists(st.integers(0, 30)))
def test_the_result_does_not_depend_on_how_the_text_is_split(text, stops, positions):
    matcher = StopStrings(stops)
    passed = "".join(matcher.feed(chunk) for chunk in split_at(text, positions)) + matcher.flush()
    assert (passed, matcher.hit) == naive_cut(text, stops)


@given(texts, stop_lists)
def test_only_text_that_may_begin_a_stop_string_is_held_back(text, stops):
    matcher, passed = StopStrings(stops), ""
    for end, letter in enumerate(text, 1):
        passed += matcher.feed(letter)
        if matcher.hit is not None:
            break
        held = text[:end].removeprefix(passed)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_no_text_follows_a_match():
    matcher = StopStrings(["."])
    assert matcher.feed("One. Two") == "One"
    assert matcher.feed(" three") == ""
    assert matcher.flush() == ""
    assert matcher.hit == "."


def test_request_order_decides_between_stop_strings_that_end_together():
    assert StopStrings(["bc", "abc"]).feed("xabc") == "xa"
    assert StopStrings(["abc", "bc"]).feed("xabc") == "x"


def test_the_stop_string_that_is_complete_first_wins():
    matcher = StopStrings(["abcd", "c"])
    assert matcher.feed("abcd") == "ab"
    assert matcher.hit == "c"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])


def test_without_stop_strings_everything_passes_at_once():
    matcher = StopStrings()
    assert matcher.feed("abc") == "abc"
    assert matcher.flush() == ""
