"""The blocks of one engine in several media, compared with a plain table."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.routing.kv_events.block_keys import block_keys
from omni_proxy.routing.kv_events.engine_blocks import MEDIA, EngineBlocks, NameReused
from omni_proxy.routing.kv_events.event_payload import StoredEvent
from tests.example_counts import examples

SIZE = 2
PARTS = st.lists(
    st.integers(0, 2), min_size=1, max_size=3
)  # of a prompt: one block for each number
MEDIUM = st.sampled_from(["", "GPU", "CPU"])


def name_of(parts):
    return hash(tuple(parts)) & ((1 << 64) - 1)


def key_of(parts):
    return block_keys([part for part in parts for _ in range(SIZE)], SIZE)[-1]


def stored(before, parts, medium):
    """A stored event, and the keys of its blocks."""
    runs = [(*before, *parts[: end + 1]) for end in range(len(parts))]
    event = StoredEvent(
        [name_of(run) for run in runs], name_of(before) if before else None, (), SIZE, medium, None,
        len(runs),
    )  # fmt: skip
    return event, [key_of(run) for run in runs]


class Cache(RuleBasedStateMachine):
    """`held` has the media of each block; a block is the tuple of all parts up to its end."""

    def __init__(self):
        super().__init__()
        self.blocks = EngineBlocks()
        self.held = {}

    @rule(data=st.data(), parts=PARTS, medium=MEDIUM)
    def store(self, data, parts, medium):
        before = data.draw(st.sampled_from([(), *self.held]))
        event, keys = stored(before, parts, medium)
        runs = [(*before, *parts[: end + 1]) for end in range(len(parts))]
        new = [key_of(run) for run in runs if run not in self.held]
        assert self.blocks.store(event, keys) == new
        for run in runs:
            self.held.setdefault(run, set()).add(medium)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), medium=MEDIUM)
    def remove(self, data, medium):
        runs = data.draw(st.lists(st.sampled_from(list(self.held)), min_size=1, max_size=3))
        removed = self.blocks.leave_medium([*map(name_of, runs), 1], medium)
        self.blocks.remove(removed)
        for run in runs:
            media = self.held.get(run, set())
            media -= {medium, ""} if medium else set(MEDIA)
            if not media:
                self.held.pop(run, None)

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 4))
    def forget_the_oldest(self, count):
        self.blocks.remove(list(self.blocks)[:count])
        for run in list(self.held)[:count]:
            del self.held[run]

    @rule()
    def clear(self):
        self.blocks.clear()
        self.held.clear()

    @invariant()
    def blocks_are_those_of_the_table(self):
        assert list(self.blocks) == [name_of(run) for run in self.held]
        assert self.blocks.keys() == [key_of(run) for run in self.held]
        holes = any(len(run) > 1 and run[:-1] not in self.held for run in self.held)
        assert self.blocks.has_holes == holes


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=examples(60), stateful_step_count=25)


def test_a_block_name_that_is_reused_for_other_tokens_is_refused():
    blocks = EngineBlocks()
    blocks.store(*stored((), [1], "GPU"))
    event, _ = stored((), [1], "GPU")
    with pytest.raises(NameReused):
        blocks.store(event, [key_of((2,))])
