import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.kv_events.block_keys import block_keys
from omni_proxy.routing.kv_events.publisher_state import (
    FLUSH_SETTLE_SECS,
    RETRY_SECS,
    PublisherState,
)

SIZE = 2
URL = "http://w"


class Engine:
    """A prefix cache that publishes, and keeps the last batches for a replay."""

    def __init__(self, at=100.0, *, kept=1000):
        self.at = at
        self.kept = kept
        self.prompts = {}  # by hash: the tokens up to the block's end
        self.log = []
        self.cached = []  # after each batch

    def _publish(self, *events):
        self.at += 1.0
        payload = msgspec.msgpack.encode([self.at, list(events), 0])
        self.log.append((len(self.log), payload))
        self.cached.append(set(self.prompts.values()))
        return self.log[-1]

    def store(self, tokens, *, medium="GPU", salt=None):
        hashes, new = [], []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            name = hash((salt, tokens[:end]))
            hashes.append(name)
            if salt is None:
                new.append((name, tokens[:end]))
        self.prompts.update(new)
        return self._publish({
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None,
            "token_ids": tokens[: len(hashes) * SIZE], "block_size": SIZE, "medium": medium,
            "extra_keys": [[salt] if salt else None] * len(hashes),
        })  # fmt: skip

    def remove(self, name):
        self.prompts.pop(name, None)
        return self._publish({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"})

    def flush(self):
        """Silent until `step`, as vLLM is."""
        self.prompts.clear()

    def clear(self):
        self.prompts.clear()
        return self._publish({"type": "AllBlocksCleared"})

    def replay(self, state, now=0.0):
        start, state.ask = state.ask, None
        for number, payload in self.log[-self.kept :]:
            if number >= start:
                state.replayed(number, payload, now)
        state.replay_ended(now)


def keys_of(prompts):
    return {list(block_keys(tokens, SIZE))[-1] for tokens in prompts}


def believed(state):
    return set(state.blocks.keys())


def heard(engine, *batches, replays=False):
    state = PublisherState(replays=replays)
    for number, payload in batches or engine.log:
        state.receive(number, payload, 0.0)
    return state


def test_a_publisher_that_was_heard_from_its_first_batch_is_exact():
    engine = Engine()
    engine.store((1, 2, 3, 4))
    engine.remove(hash((None, (1, 2, 3, 4))))
    state = heard(engine)
    assert state.mode == "exact"
    assert believed(state) == keys_of({(1, 2)})


def test_a_late_subscriber_knows_nothing_until_the_cache_is_cleared():
    engine = Engine()
    engine.store((1, 2))
    late = engine.store((3, 4))
    state = heard(engine, late)
    assert (state.mode, state.blocks.keys()) == ("inferred", [])
    state.receive(*engine.clear(), 0.0)
    state.receive(*engine.store((5, 6)), 0.0)
    assert state.mode == "exact"
    assert believed(state) == keys_of({(5, 6)})


def test_a_whole_replay_makes_a_late_subscriber_exact():
    engine = Engine()
    engine.store((1, 2))
    state = PublisherState(replays=True)
    state.connected(0.0)
    assert state.ask == 0
    live = engine.store((3, 4))
    state.receive(*live, 0.0)
    engine.replay(state)
    assert state.mode == "exact"
    assert believed(state) == keys_of({(1, 2), (3, 4)})


def test_a_replay_that_starts_later_than_asked_is_not_whole():
    engine = Engine(kept=1)
    engine.store((1, 2))
    engine.store((3, 4))
    state = PublisherState(replays=True)
    state.connected(0.0)
    engine.replay(state)
    assert state.mode == "inferred"
    assert "begins at batch 1" in state.reason
    assert not state.blocks


def test_a_gap_ends_exactness_until_the_replay_has_filled_it():
    engine = Engine()
    engine.store((1, 2))
    state = heard(engine, replays=True)
    engine.store((3, 4))
    state.receive(*engine.store((5, 6)), 0.0)
    assert (state.mode, state.ask) == ("degraded", 0)
    engine.replay(state)
    assert state.mode == "exact"
    assert believed(state) == keys_of({(1, 2), (3, 4), (5, 6)})


def test_a_gap_without_a_replay_socket_drops_everything():
    engine = Engine()
    engine.store((1, 2))
    state = heard(engine)
    engine.store((3, 4))
    state.receive(*engine.store((5, 6)), 0.0)
    assert (state.mode, state.blocks.keys()) == ("degraded", [])
    assert "batches 1 to 1 were lost" in state.reason
    state.receive(*engine.clear(), 0.0)
    assert state.mode == "exact"


def test_a_gap_that_the_replay_no_longer_has_is_not_filled():
    engine = Engine()
    engine.store((1, 2))
    engine.store((7, 8))
    state = heard(engine, replays=True)
    for first in (11, 13, 15):
        newest = engine.store((first, first + 1))
    engine.kept = 2
    state.receive(*newest, 0.0)
    engine.replay(state)
    engine.replay(state)  # all of it is asked for, too
    assert (state.mode, state.blocks.keys(), state.ask) == ("degraded", [], None)


def test_a_restarted_publisher_is_followed_from_its_first_batch():
    old = Engine()
    old.store((1, 2))
    old.store((3, 4))
    state = heard(old)
    new = Engine(at=old.at)
    state.receive(*new.store((5, 6)), 0.0)
    assert state.mode == "exact"
    assert believed(state) == keys_of({(5, 6)})


def test_a_restart_whose_first_batches_were_missed_drops_everything():
    old = Engine()
    for first in range(1, 9, 2):
        old.store((first, first + 1))
    state = heard(old)
    new = Engine(at=old.at)
    new.store((21, 22))
    state.receive(*new.store((23, 24)), 0.0)
    assert (state.mode, state.blocks.keys()) == ("degraded", [])
    assert "restarted" in state.reason


def test_the_right_number_proves_nothing_after_the_connection_broke():
    old = Engine()
    old.store((1, 2))
    state = heard(old, replays=True)
    state.disconnected()
    assert state.mode == "degraded"
    new = Engine(at=old.at)
    new.store((3, 4))
    state.receive(*new.store((5, 6)), 0.0)
    assert state.ask == 0
    new.replay(state)
    assert state.mode == "exact"
    assert believed(state) == keys_of({(3, 4), (5, 6)})


def test_the_last_batch_again_proves_that_the_engine_is_the_same():
    engine = Engine(kept=1)
    engine.store((1, 2))
    engine.store((3, 4))
    state = heard(engine, replays=True)
    state.disconnected()
    state.connected(0.0)
    assert state.ask == 1
    engine.replay(state)
    assert state.mode == "exact"
    assert believed(state) == keys_of({(1, 2), (3, 4)})


def test_a_broken_connection_without_a_replay_socket_drops_everything():
    engine = Engine()
    engine.store((1, 2))
    state = heard(engine)
    state.disconnected()
    state.receive(*engine.store((3, 4)), 0.0)
    assert (state.mode, state.blocks.keys()) == ("degraded", [])


def test_an_own_flush_clears_at_once_and_nothing_late_comes_back():
    engine = Engine()
    engine.store((1, 2))
    late = engine.store((3, 4))
    state = heard(engine, engine.log[0])
    engine.flush()
    state.flushed(10.0)
    assert (state.mode, state.blocks.keys()) == ("exact", [])
    state.receive(*late, 10.1)
    assert not state.blocks
    state.receive(*engine.clear(), 10.2)
    state.receive(*engine.store((5, 6)), 10.3)
    assert believed(state) == keys_of({(5, 6)})


def test_events_count_again_after_a_flush_that_the_engine_does_not_publish():
    engine = Engine()
    engine.store((1, 2))
    state = heard(engine)
    state.flushed(10.0)
    state.receive(*engine.store((5, 6)), 10.0 + FLUSH_SETTLE_SECS)
    assert believed(state) == keys_of({(5, 6)})


def test_a_replay_from_before_an_own_flush_is_not_believed():
    engine = Engine()
    engine.store((1, 2))
    state = heard(engine, replays=True)
    engine.flush()
    state.flushed(0.0)
    state.disconnected()
    state.connected(0.0)
    engine.replay(state)
    assert (state.mode, state.blocks.keys()) == ("degraded", [])
    state.receive(*engine.clear(), 0.0)
    assert state.mode == "exact"


def test_an_undecodable_event_ends_exactness():
    engine = Engine()
    engine.store((1, 2))
    state = heard(engine)
    state.receive(*engine._publish({"type": "BlockMoved"}), 0.0)
    assert (state.mode, state.blocks.keys(), state.undecodable) == ("degraded", [], 1)
    assert "BlockMoved" in state.reason


def test_two_publishers_on_one_address_are_not_believed():
    engine = Engine()
    engine.store((1, 2))
    state = heard(engine)
    state.receive(1, msgspec.msgpack.encode([500.0, [], 1]), 0.0)
    assert state.mode == "degraded"
    assert "several data-parallel ranks" in state.reason


def test_a_batch_that_comes_twice_changes_nothing():
    engine = Engine()
    engine.store((1, 2))
    engine.store((3, 4))
    state = heard(engine)
    for number, payload in engine.log:
        state.receive(number, payload, 0.0)
    assert state.mode == "exact"
    assert believed(state) == keys_of({(1, 2), (3, 4)})


def test_a_silent_replay_socket_is_asked_again_later():
    engine = Engine()
    engine.store((1, 2))
    state = PublisherState(replays=True)
    state.connected(0.0)
    state.ask = None
    state.replay_failed("the replay socket does not answer", 3.0)
    assert (state.mode, state.reason) == ("inferred", "the replay socket does not answer")
    state.tick(3.0 + RETRY_SECS - 0.1)
    assert state.ask is None
    state.tick(3.0 + RETRY_SECS)
    engine.replay(state)
    assert state.mode == "exact"


def test_a_block_stays_until_every_medium_has_lost_it():
    engine = Engine()
    engine.store((1, 2))
    engine.store((1, 2), medium="CPU")
    state = heard(engine)
    engine.remove(hash((None, (1, 2))))
    state.receive(*engine.log[-1], 0.0)
    assert believed(state) == keys_of({(1, 2)})
    gone = {"type": "BlockRemoved", "block_hashes": [hash((None, (1, 2)))], "medium": "CPU"}
    state.receive(*engine._publish(gone), 0.0)
    assert not state.blocks


@pytest.mark.parametrize("medium", ["DISK", "STORAGE", "EXTERNAL"])
def test_blocks_that_lie_far_away_do_not_count(medium):
    engine = Engine()
    engine.store((1, 2), medium=medium)
    assert not heard(engine).blocks


def test_salted_blocks_and_what_stands_behind_them_do_not_count():
    engine = Engine()
    engine.store((1, 2, 3, 4), salt="tenant")
    behind = {
        "type": "BlockStored", "block_hashes": [77], "token_ids": [5, 6], "block_size": 2,
        "parent_block_hash": hash(("tenant", (1, 2, 3, 4))), "medium": "GPU",
    }  # fmt: skip
    engine._publish(behind)
    state = heard(engine)
    assert (state.mode, state.blocks.keys()) == ("exact", [])


def test_the_oldest_blocks_are_dropped_first():
    engine = Engine()
    engine.store((1, 2))
    engine.store((3, 4))
    state = heard(engine)
    state.drop_oldest(1)
    assert believed(state) == keys_of({(3, 4)})


PROMPTS = st.lists(st.integers(0, 2), min_size=2, max_size=6).map(tuple)


PROMPTS = st.sampled_from([(0, 0), (0, 0, 1, 1), (0, 0, 1, 1, 0, 1), (1, 0), (1, 0, 0, 0)])
FATES = st.sampled_from(["arrives", "arrives", "arrives", "twice", "late", "lost"])


class Wire(RuleBasedStateMachine):
    """Between an engine and us batches get lost, late and doubled, the engine restarts, and its
    replay buffer is short. A broken connection is noticed, as TCP has it."""

    replays = True

    def __init__(self):
        super().__init__()
        self.engine = Engine(kept=4)
        self.state = PublisherState(replays=self.replays)
        self.index = BlockIndex()
        self.waiting = []  # published, not yet arrived
        self.arrived = -1
        self.flushed_before = -1  # what was published before a flush of ours is not there any more
        self.broken = True
        self.now = 0.0
        self.connect()

    def _take(self):
        self.index.apply(URL, self.state.take_changes())
        self.index.maintain(self.now)

    def _send(self, batch, fate):
        if self.flushed_before >= 0 and fate != "lost":
            self.waiting.append(batch)
            self.arrive_after_a_flush()
        elif fate == "late" or (self.broken and fate != "lost"):
            self.waiting.append(batch)
        elif fate != "lost":
            while self.waiting:
                self._arrive(self.waiting.pop(0))
            self._arrive(batch, again=fate == "twice")

    @rule(tokens=PROMPTS, fate=FATES, salt=st.sampled_from([None, None, None, "s"]))
    def store(self, tokens, fate, salt):
        self._send(self.engine.store(tokens, salt=salt), fate)

    @precondition(lambda self: self.engine.prompts)
    @rule(data=st.data(), fate=FATES)
    def remove(self, data, fate):
        name = data.draw(st.sampled_from(sorted(self.engine.prompts)))
        self._send(self.engine.remove(name), fate)

    @rule(fate=FATES)
    def clear(self, fate):
        self._send(self.engine.clear(), fate)

    @rule()
    def flush(self):
        """By us; the engine tells it with its next batch."""
        self.engine.flush()
        self.flushed_before = len(self.engine.log) - 1
        self.state.flushed(self.now)
        self._take()

    def arrive_after_a_flush(self):
        """With the event of the flush, which leaves the engine with its next step."""
        if self.broken:
            self.waiting.clear()
            return
        self.waiting.append(self.engine.clear())
        while self.waiting:
            self._arrive(self.waiting.pop(0))
        self.flushed_before = -1

    def _arrive(self, batch, *, again=False):
        for _ in range(1 + again):
            self.state.receive(*batch, self.now)
        self.arrived = max(self.arrived, batch[0])
        self._take()

    @precondition(lambda self: len(self.waiting) > 1 and not self.broken)
    @rule()
    def overtake(self):
        if self.flushed_before < 0:
            self._arrive(self.waiting.pop(1))

    @rule()
    def disconnect(self):
        self.waiting.clear()
        self.broken = True
        self.state.disconnected()
        self._take()

    @rule()
    def restart(self):
        self.disconnect()
        self.engine = Engine(at=self.engine.at, kept=4)
        self.arrived = self.flushed_before = -1

    @precondition(lambda self: self.broken)
    @rule()
    def connect(self):
        self.broken = False
        self.state.connected(self.now)
        self._take()

    @precondition(lambda self: self.state.ask is not None)
    @rule()
    def replay(self):
        self.engine.replay(self.state, self.now)
        self.arrived = max(self.arrived, *(number for number, _ in self.engine.log), -1)
        self._take()

    @precondition(lambda self: self.state.ask is not None)
    @rule()
    def replay_in_silence(self):
        self.state.ask = None
        self.state.replay_failed("no answer", self.now)
        self._take()

    @rule()
    def wait(self):
        self.now += RETRY_SECS
        self.state.tick(self.now)

    @invariant()
    def exact_means_what_the_engine_had_when_the_last_batch_left(self):
        self._take()
        assert self.index.is_exact(URL) == (self.state.mode == "exact")
        assert self.index.blocks == len(believed(self.state)) or self.index.maintain(0.0)
        if self.state.mode != "exact":
            return
        if self.flushed_before >= 0:
            there = self.engine.cached[self.arrived] if self.arrived > self.flushed_before else ()
        else:
            there = self.engine.cached[self.arrived] if self.arrived >= 0 else ()
        among = self.index.bit_of(URL)
        for tokens in [(0, 0), (0, 1), (1, 0), (1, 2, 0, 0), (2, 1, 1, 1, 0, 0), *there]:
            depth, _ = self.index.match(list(block_keys(tokens, SIZE)), among, self.now)
            held = 0
            while tokens[: (held + 1) * SIZE] in there and held < len(tokens) // SIZE:
                held += 1
            assert depth <= held


class WireWithoutReplay(Wire):
    replays = False


TestWire = Wire.TestCase
TestWire.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestWireWithoutReplay = WireWithoutReplay.TestCase
TestWireWithoutReplay.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
