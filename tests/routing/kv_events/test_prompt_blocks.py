"""The keys of blocks computed from the text of token ids, compared with those from tokens."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.kv_events.block_keys import block_keys
from tests.routing.kv_events.published import blocks_of

# Ids of very different lengths, so that the estimate of a block's end is far off.
TOKENS = st.lists(st.integers(0, 3) | st.integers(0, 2**20) | st.just(2**62), max_size=80)
SIZES = st.integers(1, 20)


@given(TOKENS, SIZES, st.randoms())
def test_keys_are_those_of_the_tokens_in_any_order_of_access(tokens, size, chance):
    blocks, keys = blocks_of(tokens, size), block_keys(tokens, size)
    assert blocks.count == len(keys)
    numbers = [0]
    for _ in range(min(10, len(keys))):
        number = chance.randint(1, len(keys))
        after = chance.choice([earlier for earlier in numbers if earlier < number])
        assert blocks.key(number, after) == keys[number - 1]
        numbers.append(number)
    assert blocks.computed_keys == {keys[number - 1] for number in numbers if number}


@given(TOKENS, SIZES, st.integers(1, 80))
def test_keys_of_all_blocks_in_turn_are_those_of_the_tokens(tokens, size, taken):
    blocks, keys = blocks_of(tokens, size), block_keys(tokens, size)
    assert list(blocks_of(tokens, size).each_key()) == keys
    iterator = blocks.each_key()
    assert list(islice(iterator, taken)) == keys[:taken]
    iterator.close()
    assert blocks.computed_keys == set(keys[:taken][-2:])
    if keys:
        assert blocks.last_key() == keys[-1]


@given(TOKENS, TOKENS, TOKENS, SIZES)
def test_common_blocks_are_those_with_equal_tokens(same, first_end, second_end, size):
    first, second = [*same, *first_end], [*same, *second_end]
    pairs = zip(block_keys(first, size), block_keys(second, size), strict=False)
    expected = sum(a == b for a, b in pairs)
    assert blocks_of(first, size).common(blocks_of(second, size)) == expected
    assert blocks_of(second, size).common(blocks_of(first, size)) == expected


def test_an_id_with_more_digits_is_a_different_id():
    assert blocks_of([1, 2, 3], 1).common(blocks_of([1, 2, 33], 1)) == 2
    assert blocks_of([1, 2], 1).common(blocks_of([1, 23], 1)) == 1
