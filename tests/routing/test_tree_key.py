"""Two keys in the prefix tree share a prefix as long as that of their texts, in whole blocks."""

import random

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.prefix_tree import PrefixTree
from omni_proxy.routing.tree_key import (
    HASH_BYTES,
    MAX_BLOCK,
    PLAIN,
    hash_with,
    key_length,
    text_length,
    tree_key,
)

lengths = st.integers(0, 70_000) | st.integers(PLAIN - 2, PLAIN + 200)
LONG = random.Random(4).randbytes(140_000)


def common(one, other):
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(lengths, lengths, lengths)
def test_keys_share_the_whole_blocks_that_their_texts_share(same, more, other):
    one = tree_key(LONG[:same] + b"a" * more)
    two = tree_key(LONG[:same] + b"b" * other)
    known = text_length(common(one, two))
    limit = same if more and other else min(same + more, same + other)
    assert known <= limit
    assert limit - known < max(1, min(MAX_BLOCK, limit // 16 + 1))
    assert known == text_length(key_length(limit))


@given(lengths)
def test_a_longer_text_only_extends_the_key(length):
    key = tree_key(LONG[:length])
    assert tree_key(LONG[: length + 5000]).startswith(key)
    assert len(key) == key_length(length)
    assert length - MAX_BLOCK < text_length(len(key)) <= length


def test_a_short_text_is_its_own_key_and_a_long_one_is_shortened():
    assert tree_key(b"") == b""
    assert tree_key(LONG[:PLAIN]) == LONG[:PLAIN]
    assert len(tree_key(LONG[:48_000])) < 48_000 / 20
    assert len(tree_key(LONG)) == len(tree_key(LONG[:131_072]))  # the rest is not compared


def test_hashes_depend_on_the_seed():
    keys = []
    for seed in (9, 10, 9):
        hash_with(seed)
        keys.append(tree_key(LONG[:5000]))
    one, other, again = keys
    assert again == one
    assert other[:PLAIN] == one[:PLAIN]
    places = range(PLAIN, len(other), HASH_BYTES)
    assert all(one[at : at + HASH_BYTES] != other[at : at + HASH_BYTES] for at in places)


def test_a_small_tree_holds_many_long_prompts():
    chance = random.Random(5)
    prompts = [chance.randbytes(48_000) for _ in range(300)]
    tree = PrefixTree(1_000_000)
    for prompt in prompts:
        tree.insert(tree_key(prompt), "a")
    while tree.maintain(evict=True):
        pass
    known = [tree.match(tree_key(prompt))[0] == len(tree_key(prompt)) for prompt in prompts]
    assert all(known)
    assert tree.size < 1_000_000
