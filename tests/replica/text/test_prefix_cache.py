from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_proxy.replica.text.prefix_cache import PrefixCache
from tests.example_counts import examples

MAX_ENTRIES, MAX_BYTES, MIN_TOKENS = 3, 120, 2
BYTES_PER_TOKEN = 10

token_lists = st.lists(st.integers(0, 1), max_size=14)


@dataclass(frozen=True)
class FakeKV:
    tokens: tuple[int, ...]

    @property
    def length(self):
        return len(self.tokens)

    @property
    def nbytes(self):
        return BYTES_PER_TOKEN * len(self.tokens)

    def fork(self, length):
        assert length <= self.length
        return FakeKV(self.tokens[:length])


def shared_length(left, right):
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


class AgainstADict(RuleBasedStateMachine):
    """Compares the cache with a naive one: a dict of token tuples in order of their last use."""

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(MAX_ENTRIES, MAX_BYTES, MIN_TOKENS)
        self.entries = {}

    def use(self, key):
        self.entries[key] = self.entries.pop(key)

    @rule(tokens=token_lists)
    def store(self, tokens):
        key = tuple(tokens)
        stored = self.cache.store(tokens, FakeKV(key), self.cache.epoch)
        covering = [entry for entry in self.entries if entry[: len(key)] == key]
        if len(key) < MIN_TOKENS or BYTES_PER_TOKEN * len(key) > MAX_BYTES:
            assert not stored
            return
        if covering:
            assert not stored
            self.use(covering[0])
            return
        assert stored
        for entry in list(self.entries):
            if key[: len(entry)] == entry:
                del self.entries[entry]
        self.entries[key] = None
        while (
            len(self.entries) > MAX_ENTRIES
            or BYTES_PER_TOKEN * sum(map(len, self.entries)) > MAX_BYTES
        ):
            del self.entries[next(iter(self.entries))]

    @rule(tokens=token_lists.filter(bool))
    def copy_longest_prefix(self, tokens):
        copy = self.cache.copy_longest_prefix(tokens)
        best = max((shared_length(entry, tokens[:-1]) for entry in self.entries), default=0)
        if best < MIN_TOKENS:
            assert copy is None
            return
        assert copy.tokens == tuple(tokens[:best])
        latest = [entry for entry in self.entries if shared_length(entry, tokens[:-1]) == best][-1]
        self.use(latest)

    @rule()
    def flush(self):
        assert self.cache.flush() == len(self.entries)
        self.entries.clear()

    @rule(tokens=token_lists)
    def store_after_a_flush(self, tokens):
        assert not self.cache.store(tokens, FakeKV(tuple(tokens)), self.cache.epoch - 1)

    @invariant()
    def sizes_are_equal(self):
        assert len(self.cache) == len(self.entries) <= MAX_ENTRIES
        assert self.cache.nbytes == BYTES_PER_TOKEN * sum(map(len, self.entries)) <= MAX_BYTES


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=examples(60), stateful_step_count=30)


def test_a_cache_of_zero_entries_stores_nothing():
    cache = PrefixCache(0, 1000, 2)
    assert not cache.store([1, 2, 3], FakeKV((1, 2, 3)), 0)
    assert cache.copy_longest_prefix([1, 2, 3, 4]) is None


def test_a_copied_prefix_never_covers_the_last_token():
    cache = PrefixCache(4, 1000, 2)
    cache.store([1, 2, 3, 4], FakeKV((1, 2, 3, 4)), 0)
    assert cache.copy_longest_prefix([1, 2, 3, 4]).tokens == (1, 2, 3)
    assert cache.copy_longest_prefix([1, 2]) is None
