"""The end of the first N ids in their text, compared with the lengths of their texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing import token_id_text as tested
from omni_proxy.routing.kv_events.block_keys import encode_token_ids
from omni_proxy.routing.token_id_text import TokenIdText, without_spaces

# Ids of very different lengths, so that the estimate of an end is far off.
IDS = st.lists(st.integers(0, 3) | st.integers(0, 2**20) | st.just(2**62), max_size=80)


@pytest.fixture(params=[7, 64, 4096])
def part_sizes(request, monkeypatch):
    # The native build has none of these constants.
    monkeypatch.setattr(tested, "PART", request.param, raising=False)
    monkeypatch.setattr(tested, "_FEW", request.param % 4, raising=False)
    monkeypatch.setattr(tested, "LONG", request.param * 2, raising=False)
    monkeypatch.setattr(tested, "_EARLY", request.param % 5, raising=False)


@pytest.mark.usefixtures("part_sizes")
def test_the_end_of_ids_is_the_length_of_their_text():
    @given(IDS, st.booleans())
    def ends(ids, is_counted):
        text = TokenIdText(encode_token_ids(ids), len(ids) if is_counted else None)
        assert text.tokens == len(ids)
        expected = [len(encode_token_ids(ids[:count])) for count in range(len(ids) + 1)]
        assert [text.end_of(count) for count in range(len(ids) + 1)] == expected

    ends()


@given(IDS, st.integers(0, 100), st.integers(0, 120))
def test_a_wrong_count_of_ids_gives_some_offset_in_their_text(ids, count, number):
    text = TokenIdText(encode_token_ids(ids), count)
    assert 0 <= text.end_of(number) <= len(text.data)


def test_the_end_of_ids_is_exact_in_a_long_prompt():
    ids = [number * 7919 % 150_000 for number in range(5000)]
    text, end = TokenIdText(encode_token_ids(ids)), 0
    assert text.tokens == len(ids)
    for count, token in enumerate(ids, 1):
        end += len(encode_token_ids([token]))
        assert text.end_of(count) == end


@given(st.text(" ,0\n\u00e9", max_size=300))
def test_only_spaces_are_removed(text):
    assert without_spaces(text.encode()) == text.replace(" ", "").encode()
