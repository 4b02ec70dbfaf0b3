"""Events of the blocks, against a reader that believes them and the cache's own entries."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_proxy.replica.kv_events.held_blocks import (
    BlocksRemoved,
    BlocksStored,
    HeldBlocks,
    block_hashes,
)
from omni_proxy.replica.text.prefix_cache import PrefixCache
from tests.example_counts import examples

BLOCK = 3
MAX_ENTRIES, MAX_BYTES = 3, 40

token_lists = st.lists(st.integers(0, 1), max_size=14)


@dataclass(frozen=True)
class Tokens:
    tokens: tuple[int, ...]

    @property
    def length(self):
        return len(self.tokens)

    @property
    def nbytes(self):
        return len(self.tokens)

    def fork(self, length):
        return Tokens(self.tokens[:length])


class Reader:
    """Knows the text of each block by the events alone."""

    def __init__(self):
        self.texts = {}

    def read(self, events):
        for event in events:
            match event:
                case BlocksStored(hashes, parent, tokens):
                    assert len(tokens) == BLOCK * len(hashes)
                    for place, each in enumerate(hashes):
                        assert each not in self.texts
                        own = tokens[place * BLOCK : (place + 1) * BLOCK]
                        self.texts[each] = (self.texts[parent] if parent else ()) + own
                        parent = each
                case BlocksRemoved(hashes):
                    for each in hashes:
                        gone = self.texts.pop(each)
                        longer = [text for text in self.texts.values() if len(text) > len(gone)]
                        assert gone not in [text[: len(gone)] for text in longer]
                case _:
                    self.texts.clear()


class EventsOfACache(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(MAX_ENTRIES, MAX_BYTES, min_tokens=1)
        self.cache.listener = self
        self.blocks = HeldBlocks(BLOCK)
        self.reader = Reader()
        self.entries = []

    def on_kept(self, tokens, dropped):
        self.entries = [each for each in self.entries if each not in dropped] + [tokens]
        self.reader.read(self.blocks.change(tokens, dropped))

    def on_cleared(self):
        self.entries = []
        self.reader.read(self.blocks.clear())

    @rule(tokens=token_lists)
    def keep(self, tokens):
        self.cache.keep(tokens, Tokens(tuple(tokens)), self.cache.epoch)

    @rule(tokens=token_lists.filter(bool))
    def lend(self, tokens):
        self.cache.lend(tokens)

    @rule()
    def flush(self):
        self.cache.flush()

    @invariant()
    def the_reader_knows_every_block_of_every_entry_and_no_other(self):
        assert len(self.entries) == len(self.cache)
        kept = {
            entry[:end] for entry in self.entries for end in range(BLOCK, len(entry) + 1, BLOCK)
        }
        assert set(self.reader.texts.values()) == kept
        assert set(self.reader.texts) == self.blocks.held


TestEventsOfACache = EventsOfACache.TestCase
TestEventsOfACache.settings = settings(max_examples=examples(50), stateful_step_count=25)


def test_a_hash_names_the_block_and_all_before_it():
    one = list(block_hashes([1, 2, 3, 4], 2))
    assert one == list(block_hashes([1, 2, 3, 4, 5], 2))
    assert one[0] == next(block_hashes([1, 2], 2))
    assert one[1] not in block_hashes([3, 4, 3, 4], 2)
    assert all(0 <= each < 2**64 for each in one)


def test_hashes_are_the_same_in_every_process():
    assert list(block_hashes(range(32), 16)) == [11960025834380122447, 5935103421891022402]


def test_a_longer_text_stores_only_what_is_new():
    blocks = HeldBlocks(2)
    (first,) = blocks.change((1, 2, 3), [])
    (more,) = blocks.change((1, 2, 3, 4, 5, 6), [(1, 2, 3)])
    assert (first.parent, first.tokens) == (None, (1, 2))
    assert (more.parent, more.tokens) == (first.hashes[0], (3, 4, 5, 6))


def test_a_text_without_a_complete_block_is_no_event():
    blocks = HeldBlocks(16)
    assert blocks.change((1, 2, 3), []) == []
    assert blocks.change((4, 5), [(1, 2, 3)]) == []


def test_removals_come_before_the_block_that_needed_the_room():
    blocks = HeldBlocks(2)
    (old,) = blocks.change((1, 2, 3, 4), [])
    removed, stored = blocks.change((5, 6), [(1, 2, 3, 4)])
    assert removed.hashes == tuple(reversed(old.hashes))
    assert stored.tokens == (5, 6)
