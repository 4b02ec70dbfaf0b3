"""Where so many ids end, beside the ends that splitting them gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.kv_events import token_id_text as tested
from omni_proxy.routing.kv_events.block_keys import spell
from omni_proxy.routing.kv_events.token_id_text import SpelledIds, without_spaces

# Of very different lengths, so that the guess where one ends is far off.
IDS = st.lists(st.integers(0, 3) | st.integers(0, 2**20) | st.just(2**62), max_size=80)


@pytest.fixture(params=[7, 64, 4096])
def part(request, monkeypatch):
    # The native build has none of these.
    monkeypatch.setattr(tested, "PART", request.param, raising=False)
    monkeypatch.setattr(tested, "_FEW", request.param % 4, raising=False)
    monkeypatch.setattr(tested, "LONG", request.param * 2, raising=False)
    monkeypatch.setattr(tested, "_EARLY", request.param % 5, raising=False)


@pytest.mark.usefixtures("part")
def test_ids_end_where_their_spelling_does():
    @given(IDS, st.booleans())
    def ends(ids, is_counted):
        spelled = SpelledIds(spell(ids), len(ids) if is_counted else None)
        assert spelled.tokens == len(ids)
        expected = [len(spell(ids[:count])) for count in range(len(ids) + 1)]
        assert [spelled.end_of(count) for count in range(len(ids) + 1)] == expected

    ends()


@given(IDS, st.integers(0, 100), st.integers(0, 120))
def test_a_wrong_number_of_ids_gives_some_place_in_their_spelling(ids, count, asked):
    spelled = SpelledIds(spell(ids), count)
    assert 0 <= spelled.end_of(asked) <= len(spelled.spelled)


def test_the_ids_of_a_long_prompt_end_where_their_spelling_does():
    ids = [number * 7919 % 150_000 for number in range(5000)]
    spelled, end = SpelledIds(spell(ids)), 0
    assert spelled.tokens == len(ids)
    for count, one in enumerate(ids, 1):
        end += len(spell([one]))
        assert spelled.end_of(count) == end


@given(st.text(" ,0\n\u00e9", max_size=300))
def test_spaces_go_and_nothing_else(text):
    assert without_spaces(text.encode()) == text.replace(" ", "").encode()
