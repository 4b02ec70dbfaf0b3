import random
import tracemalloc
from itertools import islice

import pytest

from omni_proxy.routing.prefix_tree import DROPPED_PER_SLICE, PrefixTree
from tests.example_counts import thorough


def prompts_of_a_service(chance):
    """A few system prompts, each with many different endings."""
    systems = [chance.randbytes(1500) for _ in range(16)]
    while True:
        yield chance.choice(systems) + chance.randbytes(chance.randint(100, 500))


def short_random_texts(chance):
    while True:
        yield chance.randbytes(40)


@pytest.mark.parametrize("texts", [prompts_of_a_service, short_random_texts])
def test_a_full_tree_takes_at_most_three_bytes_for_each_byte_of_its_limit(texts):
    size = 2_000_000 if thorough() else 800_000
    source = islice(texts(random.Random(9)), size * 3 // 200)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tree = PrefixTree(size)
        for text in source:
            tree.insert(text, "abcd"[text[0] % 4])
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert tree.size > size or tree.nodes >= tree.max_nodes
    assert used <= 3 * size


@pytest.mark.parametrize("by_inserts", [False, True])
def test_the_nodes_of_a_cleared_tree_are_dropped_in_slices(by_inserts):
    tree = PrefixTree(10**6)
    for number in range(3000):
        tree.insert(b"%d" % number, "a")
    tree.clear()
    while tree.nodes:
        assert tree.maintain(evict=False)
    tables = 256  # for the children of nodes by first byte, beside a few other ones
    inserts = 4 * DROPPED_PER_SLICE if by_inserts else 0
    for _ in range(inserts):  # drop one each
        tree.insert(b"the first after it", "a")
    slices = 1
    while tree.maintain(evict=False):
        slices += 1
    assert 0 < slices * DROPPED_PER_SLICE - (tables - inserts) < 2 * DROPPED_PER_SLICE
    tree.insert(b"the first after it", "a")
    assert tree.match(b"the first")[0] == 9
