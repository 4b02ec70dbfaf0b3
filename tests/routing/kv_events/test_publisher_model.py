from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.kv_events.publisher_state import (
    RETRY_SECS,
    PublisherState,
)
from tests.example_counts import examples
from tests.routing.kv_events.published import SIZE, Engine, believed, blocks_of

URL = "http://w"

PROMPTS = st.sampled_from([(0, 0), (0, 0, 1, 1), (0, 0, 1, 1, 0, 1), (1, 0), (1, 0, 0, 0)])
DELIVERIES = st.sampled_from(["arrives", "arrives", "arrives", "twice", "late", "lost"])


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

    def _send(self, batch, delivery):
        if self.flushed_before >= 0 and delivery != "lost":
            self.waiting.append(batch)
            self.arrive_after_a_flush()
        elif delivery == "late" or (self.broken and delivery != "lost"):
            self.waiting.append(batch)
        elif delivery != "lost":
            while self.waiting:
                self._arrive(self.waiting.pop(0))
            self._arrive(batch, again=delivery == "twice")

    @rule(tokens=PROMPTS, delivery=DELIVERIES, salt=st.sampled_from([None, None, None, "s"]))
    def store(self, tokens, delivery, salt):
        self._send(self.engine.store(tokens, salt=salt), delivery)

    @precondition(lambda self: self.engine.prompts)
    @rule(data=st.data(), delivery=DELIVERIES)
    def remove(self, data, delivery):
        name = data.draw(st.sampled_from(sorted(self.engine.prompts)))
        self._send(self.engine.remove(name), delivery)

    @rule(delivery=DELIVERIES)
    def clear(self, delivery):
        self._send(self.engine.clear(), delivery)

    @precondition(lambda self: not self.waiting)
    @rule()
    def set_the_clock_of_the_engine_back(self):
        self.engine.at -= 50.0

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
            depth, _ = self.index.match(blocks_of(tokens), among, self.now)
            held = 0
            while tokens[: (held + 1) * SIZE] in there and held < len(tokens) // SIZE:
                held += 1
            assert depth <= held


class WireWithoutReplay(Wire):
    replays = False


TestWire = Wire.TestCase
TestWire.settings = settings(max_examples=examples(40), stateful_step_count=30)
TestWireWithoutReplay = WireWithoutReplay.TestCase
TestWireWithoutReplay.settings = settings(max_examples=examples(25), stateful_step_count=30)
