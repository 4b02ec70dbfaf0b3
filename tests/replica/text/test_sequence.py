import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.text.sequence import StopStrings

texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def cut(text, stops):
    """The naive way: check every prefix of the text, the shortest first."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def pieces_of(text, places):
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]


@given(texts, stop_lists, st.lists(st.integers(0, 30)))
def test_any_split_gives_what_the_whole_text_gives(text, stops, places):
    found = StopStrings(stops)
    out = "".join(found.feed(piece) for piece in pieces_of(text, places)) + found.flush()
    assert (out, found.hit) == cut(text, stops)


@given(texts, stop_lists)
def test_only_what_may_begin_a_stop_string_is_held_back(text, stops):
    found, out = StopStrings(stops), ""
    for end, letter in enumerate(text, 1):
        out += found.feed(letter)
        if found.hit is not None:
            break
        held = text[:end].removeprefix(out)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_no_text_follows_a_match():
    found = StopStrings(["."])
    assert found.feed("One. Two") == "One"
    assert found.feed(" three") == ""
    assert found.flush() == ""
    assert found.hit == "."


def test_request_order_decides_between_those_that_end_together():
    assert StopStrings(["bc", "abc"]).feed("xabc") == "xa"
    assert StopStrings(["abc", "bc"]).feed("xabc") == "x"


def test_the_one_that_is_complete_first_wins_over_one_that_began_earlier():
    found = StopStrings(["abcd", "c"])
    assert found.feed("abcd") == "ab"
    assert found.hit == "c"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])


def test_without_stop_strings_everything_passes_at_once():
    found = StopStrings()
    assert found.feed("abc") == "abc"
    assert found.flush() == ""
