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
class ProcessResources:
    tokens: tuple[int, ...]

    @property
    def length(self):
        return len(self.tokens)

    @property
    def nbytes(self):
        return BYTES_PER_TOKEN * len(self.tokens)

    def fork(self, length):
        assert length <= self.length
        return ProcessResources(self.tokens[:length])


def shared(left, right):
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


class AgainstADict(RuleBasedStateMachine):
    """The naive model: a dict of token tuples in order of their last use."""

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(MAX_ENTRIES, MAX_BYTES, MIN_TOKENS)
        self.known = {}

    def use(self, key):
        self.known[key] = self.known.pop(key)

    @rule(tokens=token_lists)
    def keep(self, tokens):
        key = tuple(tokens)
        took = self.cache.keep(tokens, ProcessResources(key), self.cache.epoch)
        covering = [known for known in self.known if known[: len(key)] == key]
        if len(key) < MIN_TOKENS or BYTES_PER_TOKEN * len(key) > MAX_BYTES:
            assert not took
            return
        if covering:
            assert not took
            self.use(covering[0])
            return
        assert took
        for known in list(self.known):
            if key[: len(known)] == known:
                del self.known[known]
        self.known[key] = None
        while (
            len(self.known) > MAX_ENTRIES or BYTES_PER_TOKEN * sum(map(len, self.known)) > MAX_BYTES
        ):
            del self.known[next(iter(self.known))]

    @rule(tokens=token_lists.filter(bool))
    def lend(self, tokens):
        lent = self.cache.lend(tokens)
        best = max((shared(known, tokens[:-1]) for known in self.known), default=0)
        if best < MIN_TOKENS:
            assert lent is None
            return
        assert lent.tokens == tuple(tokens[:best])
        latest = [known for known in self.known if shared(known, tokens[:-1]) == best][-1]
        self.use(latest)

    @rule()
    def flush(self):
        assert self.cache.flush() == len(self.known)
        self.known.clear()

    @rule(tokens=token_lists)
    def keep_what_was_begun_before_the_last_flush(self, tokens):
        assert not self.cache.keep(tokens, ProcessResources(tuple(tokens)), self.cache.epoch - 1)

    @invariant()
    def holds_the_same(self):
        assert len(self.cache) == len(self.known) <= MAX_ENTRIES
        assert self.cache.nbytes == BYTES_PER_TOKEN * sum(map(len, self.known)) <= MAX_BYTES


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=examples(60), stateful_step_count=30)


def test_no_entries_turn_it_off():
    cache = PrefixCache(0, 1000, 2)
    assert not cache.keep([1, 2, 3], ProcessResources((1, 2, 3)), 0)
    assert cache.lend([1, 2, 3, 4]) is None


def test_the_last_token_is_never_covered():
    cache = PrefixCache(4, 1000, 2)
    cache.keep([1, 2, 3, 4], ProcessResources((1, 2, 3, 4)), 0)
    assert cache.lend([1, 2, 3, 4]).tokens == (1, 2, 3)
    assert cache.lend([1, 2]) is None
