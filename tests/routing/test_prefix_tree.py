import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omni_proxy.routing import prefix_tree
from omni_proxy.routing.prefix_tree import (
    EVICTED_PER_SLICE,
    MIN_NODES,
    ROOT,
    PrefixTree,
    common_length,
)
from tests.example_counts import examples

HOLDERS = ("a", "b", "c")
texts = st.binary(max_size=40) | st.text("ab", max_size=12).map(str.encode)
longer = st.text("xy", min_size=60, max_size=300).map(str.encode)


def prefixes(held):
    return {text[:end] for text in held for end in range(1, len(text) + 1)}


def common(one, other):
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


# `ring`, `audit` and `AgainstStrings.lose` read the columns of the tree: what they check (the order
# of nodes, the holders of removed ones, numbers that were reused) must hold between any two calls,
# and shows in matches only much later. A copy by `columns` has already lost part of it.


def ring(tree):
    """The nodes from the oldest to the newest."""
    order, node = [], tree._newer[ROOT]
    while node != ROOT:
        order.append(node)
        node = tree._newer[node]
    back, node = [], tree._older[ROOT]
    while node != ROOT:
        back.append(node)
        node = tree._older[node]
    assert back == order[::-1]
    return order


def audit(tree):
    """Checks the internal invariants of the tree."""
    order = ring(tree)
    assert len(order) == tree.nodes == sum(map(len, tree._edges))
    assert sum(len(tree._labels[node]) for node in order) == tree.size
    age = {node: place for place, node in enumerate(order)}
    kids = dict.fromkeys([ROOT, *order], 0)
    for node in order:
        parent, label = tree._parents[node], tree._labels[node]
        kids[parent] += 1
        assert tree._edges[label[0]][parent] == node
        if parent != ROOT:
            assert age[parent] > age[node]
            assert not tree._masks[node] & tree._live & ~tree._masks[parent]
    assert all(tree._child_counts[node] == count for node, count in kids.items())
    assert not tree._live & tree._dead
    for name, bit in tree._bits.items():
        held = sum(len(tree._labels[node]) for node in order if tree._masks[node] & bit)
        assert tree.size_of(name) == held


class SlowSweep(RuleBasedStateMachine):
    """The sweep is so slow that forgotten holders stay on nodes for some steps."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix_tree, "SWEPT_PER_INSERT", 1)
        self.patch.setattr(prefix_tree, "SWEPT_PER_SLICE", 3)

    def teardown(self):
        self.patch.undo()


class AgainstStrings(SlowSweep):
    """Compares the tree, without eviction, with a dict of plain texts."""

    @initialize()
    def plant(self):
        self.tree = PrefixTree(10**9)
        self.held = {}  # texts by holder
        self.used = {}  # by prefix: the number of its latest insertion
        self.inserted = {}  # by insertion number: text, holder and place
        self.number = 0

    @rule(text=texts | longer, holder=st.sampled_from(HOLDERS))
    def insert(self, text, holder):
        before = self.held.setdefault(holder, set())
        self.number += 1
        place = self.tree.insert(text, holder, self.number)
        if text:
            assert place.length == len(text)
            assert place.held == max((common(text, known) for known in before), default=0)
            self.inserted[self.number] = text, holder, place
        before.add(text)
        self.used |= dict.fromkeys(prefixes([text]), self.number)

    @rule(data=st.data())
    def lose(self, data):
        """A holder loses what it has below some length of a text, with all branches."""
        if not self.inserted:
            return
        number = data.draw(st.sampled_from(sorted(self.inserted)))
        text, holder, place = self.inserted[number]
        length, before = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, number))
        generations = self.tree._generations
        known = place.node < len(generations) and generations[place.node] == place.generation
        self.tree.forget_below(place, holder, length, before)
        while self.tree._lost:
            self.tree._prune(1)
        if known and holder in self.held:
            self.held[holder] = {
                prefix
                for prefix in prefixes(self.held[holder])
                if common(prefix, text) <= length
                or text.startswith(prefix)
                or self.used[prefix] >= before
            }

    @rule(data=st.data(), tail=texts, holder=st.sampled_from(HOLDERS))
    def grow(self, data, tail, holder):
        known = sorted(set().union(*self.held.values()))
        if known:
            text = data.draw(st.sampled_from(known))
            self.insert(text[: data.draw(st.integers(0, len(text)))] + tail, holder)

    @rule(holder=st.sampled_from(HOLDERS))
    def forget(self, holder):
        self.tree.forget(holder)
        self.held.pop(holder, None)

    @rule()
    def clear(self):
        self.tree.clear()
        self.held.clear()

    @rule()
    def sweep_a_little(self):
        self.tree.maintain(evict=False)

    @rule()
    def sweep_to_the_end(self):
        while self.tree.maintain(evict=False):
            pass
        assert self.tree.size == len(prefixes(set().union(*self.held.values())))

    @rule(text=texts | longer, among=st.sets(st.sampled_from(HOLDERS)))
    def match(self, text, among):
        depths = {
            holder: max(common(text, known) for known in held) for holder, held in self.held.items()
        }
        depths = {holder: depth for holder, depth in depths.items() if depth}
        assert self.tree.depths(text) == depths
        deepest = max(depths.values(), default=0)
        length, mask = self.tree.match(text)
        assert (length, set(self.tree.named(mask))) == (
            deepest, {holder for holder, depth in depths.items() if depth == deepest},
        )  # fmt: skip
        left = {holder: depth for holder, depth in depths.items() if holder in among}
        length, mask = self.tree.match(text, self.tree.mask_of(among))
        assert length == max(left.values(), default=0)
        assert set(self.tree.named(mask)) == {
            holder for holder, depth in left.items() if depth == length
        }

    @invariant()
    def sizes_are_the_distinct_prefixes(self):
        for holder in HOLDERS:
            assert self.tree.size_of(holder) == len(prefixes(self.held.get(holder, ())))
        assert set(self.tree.holders()) == set(self.held)

    @invariant()
    def internal_invariants_hold(self):
        audit(self.tree)


class UnderPressure(SlowSweep):
    """A tree too small for its texts never reports more than was inserted."""

    MAX = 200

    @initialize()
    def plant(self):
        self.tree = PrefixTree(self.MAX)
        self.held = {}

    @rule(text=texts, holder=st.sampled_from(HOLDERS))
    def insert(self, text, holder):
        self.tree.insert(text, holder)
        self.held.setdefault(holder, set()).add(text)
        length, mask = self.tree.match(text)
        assert length == len(text)
        assert not text or holder in self.tree.named(mask)

    @rule(holder=st.sampled_from(HOLDERS))
    def forget(self, holder):
        self.tree.forget(holder)
        self.held.pop(holder, None)

    @rule()
    def maintain(self):
        while self.tree.maintain(evict=True):
            pass
        assert self.tree.size <= self.MAX

    @rule(text=texts)
    def match(self, text):
        for holder, depth in self.tree.depths(text).items():
            assert depth <= max(common(text, known) for known in self.held[holder])

    @invariant()
    def its_size_is_bounded(self):
        assert self.tree.size <= self.MAX * 5 // 4 + 40
        audit(self.tree)


TestAgainstStrings = AgainstStrings.TestCase
TestAgainstStrings.settings = settings(max_examples=examples(60), stateful_step_count=30)
TestUnderPressure = UnderPressure.TestCase
TestUnderPressure.settings = settings(max_examples=examples(60), stateful_step_count=40)


@given(st.binary(max_size=300), st.integers(0, 300), st.binary(min_size=1, max_size=5), st.data())
def test_common_length_is_the_length_of_the_common_prefix(text, same, tail, data):
    at = data.draw(st.integers(0, 5))
    label = text[:same] + tail
    assert common_length(label, b"~" * at + text, at) == common(label, text)


def test_the_least_recently_used_leaf_is_evicted_first():
    tree = PrefixTree(24)
    for text in (b"shared-one", b"shared-two", b"other-text"):
        tree.insert(text, "a")
    tree.insert(b"shared-one", "b")
    tree.max_size = 22
    assert not tree.maintain(evict=True)
    assert tree.match(b"shared-two")[0] == len(b"shared-")
    assert tree.match(b"shared-one")[0] == len(b"shared-one")
    assert tree.match(b"other-text")[0] == len(b"other-text")


def test_a_match_does_not_count_as_use():
    tree = PrefixTree(100)
    tree.insert(b"first", "a")
    tree.insert(b"second", "a")
    assert tree.match(b"first")[0] == 5
    tree.max_size = 6
    tree.maintain(evict=True)
    assert (tree.match(b"first")[0], tree.match(b"second")[0]) == (0, 6)


def test_a_text_of_several_holders_counts_once_in_total_and_once_for_each():
    tree = PrefixTree(100)
    for holder in HOLDERS:
        tree.insert(b"the same", holder)
    assert tree.size == 8
    assert [tree.size_of(holder) for holder in HOLDERS] == [8, 8, 8]


def test_a_holder_is_forgotten_at_once_and_its_memory_freed_in_slices():
    tree = PrefixTree(10**9)
    for number in range(3000):
        tree.insert(b"%d-of-many" % number, "a")
    tree.insert(b"7-of-b", "b")
    tree.forget("a")
    assert (tree.size_of("a"), tree.match(b"8-of-many")) == (0, (0, 0))
    assert tree.match(b"7-of-b")[0] == 6
    steps = [tree.size]
    while tree.maintain(evict=False):
        steps.append(tree.size)
    assert len(steps) > 2
    assert all(later < earlier for earlier, later in pairwise(steps))
    assert (tree.size, tree.nodes <= 3) == (6, True)
    audit(tree)


def test_a_worker_added_again_during_its_removal_starts_empty():
    tree = PrefixTree(10**9)
    for number in range(2000):
        tree.insert(b"%d-of-many" % number, "a")
    tree.forget("a")
    tree.maintain(evict=False)
    tree.insert(b"9-of-many", "a")
    assert tree.size_of("a") == 9
    while tree.maintain(evict=False):
        pass
    assert (tree.size, tree.size_of("a"), tree.match(b"9-of-others")[0]) == (9, 9, 5)
    audit(tree)


def test_inserts_alone_free_the_memory_of_forgotten_holders():
    tree = PrefixTree(10**9)
    for number in range(2000):
        tree.insert(b"%d-of-many" % number, "a")
    tree.forget("a")
    for _ in range(500):
        tree.insert(b"the rest", "b")
    assert (tree.size, tree.nodes) == (8, 1)


def test_nothing_is_below_a_text_of_which_everything_is_kept():
    tree = PrefixTree(10**9)
    tree.insert(b"abcd", "a", 1)
    place = tree.insert(b"abc", "a", 2)
    tree.forget_below(place, "a", place.length, 2)
    assert tree.depths(b"abcd") == {"a": 4}


def test_a_later_worker_inherits_nothing_from_a_removed_one():
    tree = PrefixTree(10**9)
    for number in range(2000):
        tree.insert(b"%04d" % number, "a")
    tree.insert(b"late-one", "a")
    tree.insert(b"late-one", "b")
    tree.forget("a")
    assert tree.maintain(evict=False)
    tree.insert(b"late-two", "b")  # a new node with a number that the sweep has passed
    while tree.maintain(evict=False):
        pass
    tree.insert(b"else", "c")
    assert tree.depths(b"late-one") == {"b": 8}
    audit(tree)


def test_one_slice_of_eviction_is_bounded():
    tree = PrefixTree(10**9)
    for number in range(5000):
        tree.insert(b"%05d" % number, "a")
    before = tree.nodes
    tree.max_size = 1
    assert tree.maintain(evict=True)
    assert before - tree.nodes == EVICTED_PER_SLICE


def test_a_flood_of_different_texts_is_evicted_as_it_arrives():
    chance = random.Random(3)
    tree = PrefixTree(50_000)
    for _ in range(2000):
        tree.insert(chance.randbytes(chance.randint(1, 2000)), "a")
        assert tree.size <= 50_000 * 5 // 4 + 2000
    audit(tree)


def test_texts_that_arrive_faster_than_eviction_are_not_inserted():
    tree = PrefixTree(800_000)
    for number in range(5000):
        tree.insert(b"%04d" % number, "a")
    for number in range(40):
        tree.insert(bytes([number]) * 60_000, "a")
        assert tree.size <= 800_000 * 5 // 4 + 60_000
    assert tree.match(bytes([39]) * 60_000)[0] == 0
    while tree.maintain(evict=True):
        pass
    tree.insert(b"\xff" * 60_000, "a")
    assert tree.match(b"\xff" * 60_000)[0] == 60_000


def test_many_texts_that_differ_by_one_byte_make_a_bounded_number_of_nodes():
    tree = PrefixTree(10_000)
    text = b"\x00" * 2500
    for end in range(2500):
        tree.insert(text[:end] + b"\x01", "a")
        assert tree.nodes <= MIN_NODES + 2
    audit(tree)


def test_a_growing_conversation_stays_one_node():
    tree = PrefixTree(10**6)
    text = b""
    for turn in range(50):
        text += b"turn %d " % turn
        tree.insert(text, "a")
    assert tree.nodes <= 2
    assert tree.match(text + b"more")[0] == len(text)


def test_there_can_be_more_holders_than_a_word_has_bits():
    tree = PrefixTree(10**6)
    for number in range(200):
        tree.insert(b"shared" + b"%d" % (number % 10), number)
    _, mask = tree.match(b"shared")
    assert sorted(tree.named(mask)) == list(range(200))
    for number in range(0, 200, 2):
        tree.forget(number)
    while tree.maintain(evict=False):
        pass
    assert sorted(tree.named(tree.match(b"shared")[1])) == list(range(1, 200, 2))
    audit(tree)


def test_a_cleared_tree_is_empty_and_grows_again():
    tree = PrefixTree(10**6)
    for number in range(3000):
        tree.insert(b"%d" % number, number % 3)
    tree.clear()
    assert tree.match(b"12")[0] == 0
    while tree.maintain(evict=False):
        pass
    assert (tree.size, tree.nodes, tree.columns().labels) == (0, 0, [b""])
    tree.insert(b"12", 0)
    assert tree.match(b"123")[0] == 2
    audit(tree)
