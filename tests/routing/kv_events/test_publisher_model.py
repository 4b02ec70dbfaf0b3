from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.kv_events.publisher_state import (
    RETRY_SECS,
    PublisherState,
)
from tests.example_counts import examples
from tests.routing.kv_events.published import SIZE, Engine, blocks_of, keys_in

URL = "http://w"

PROMPTS = st.sampled_from([(0, 0), (0, 0, 1, 1), (0, 0, 1, 1, 0, 1), (1, 0), (1, 0, 0, 0)])
DELIVERIES = st.sampled_from(["arrives", "arrives", "arrives", "twice", "late", "lost"])


class Wire(RuleBasedStateMachine):
    """Batches from the engine are lost, delayed and duplicated, the engine restarts, and its
    replay buffer is short. A broken connection is noticed, as with TCP."""

    replays = True

    def __init__(self):
        super().__init__()
        self.engine = Engine(kept=4)
        self.state = PublisherState(replays=self.replays)
        self.index = BlockIndex()
        self.waiting = []  # published batches that have not arrived
        self.arrived = -1
        self.flushed_before = -1  # batches up to this one precede the proxy's last flush
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
        """The proxy flushes the cache; the engine publishes it with its next batch."""
        self.engine.flush()
        self.flushed_before = len(self.engine.log) - 1
        self.state.flushed(self.now)
        self._take()

    def arrive_after_a_flush(self):
        """The engine publishes the event of the flush with its next batch."""
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

    @precondition(lambda self: self.state.replay_from is not None)
    @rule()
    def replay(self):
        self.engine.replay(self.state, self.now)
        self.arrived = max(self.arrived, *(number for number, _ in self.engine.log), -1)
        self._take()

    @precondition(lambda self: self.state.replay_from is not None)
    @rule()
    def replay_without_a_response(self):
        self.state.replay_from = None
        self.state.replay_failed("no answer", self.now)
        self._take()

    @rule()
    def wait(self):
        self.now += RETRY_SECS
        self.state.tick(self.now)

    @invariant()
    def an_exact_state_holds_no_more_than_the_engine_had_at_the_last_batch(self):
        self._take()
        assert self.index.is_exact(URL) == (self.state.mode == "exact")
        assert self.index.blocks == len(keys_in(self.state)) or self.index.maintain(0.0)
        if self.state.mode != "exact":
            return
        if self.flushed_before >= 0:
            cached = self.engine.cached[self.arrived] if self.arrived > self.flushed_before else ()
        else:
            cached = self.engine.cached[self.arrived] if self.arrived >= 0 else ()
        among = self.index.bit_of(URL)
        for tokens in [(0, 0), (0, 1), (1, 0), (1, 2, 0, 0), (2, 1, 1, 1, 0, 0), *cached]:
            depth, _ = self.index.match(blocks_of(tokens), among, self.now)
            held = 0
            while tokens[: (held + 1) * SIZE] in cached and held < len(tokens) // SIZE:
                held += 1
            assert depth <= held


class WireWithoutReplay(Wire):
    replays = False


TestWire = Wire.TestCase
TestWire.settings = settings(max_examples=examples(40), stateful_step_count=30)
TestWireWithoutReplay = WireWithoutReplay.TestCase
TestWireWithoutReplay.settings = settings(max_examples=examples(25), stateful_step_count=30)
