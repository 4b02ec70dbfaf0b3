import msgspec
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.replica.models.kv import KVShape, SequenceKV
from omni_proxy.replica.tp.sharded_model import KVJournal, KVMirror, MirroredKV
from tests.example_counts import examples

SHAPE = KVShape(layers=1, kv_heads=1, head_size=1, limit=200)
LIKE = torch.zeros(1)


def append(kv: SequenceKV, values: list[float]) -> None:
    kv.reserve(len(values))
    rows = torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 2, 1, 1)
    kv.write(0, rows)
    kv.length += len(values)


def values_of(kv: SequenceKV) -> list[float]:
    keys, _ = kv.write(0, LIKE.new_empty(0, 2, 1, 1))
    return keys.flatten().tolist()


class KVMirroring(RuleBasedStateMachine):
    """The KVs of a leader, and a follower that gets the journal with each step."""

    def __init__(self):
        super().__init__()
        self.journal = KVJournal()
        self.live: list[MirroredKV] = []
        self.mirror = KVMirror(lambda: SequenceKV(SHAPE, LIKE))
        self.in_sync = True

    def drawn(self, data) -> MirroredKV:
        # Draws an index: Hypothesis would keep a reference to a drawn KV, which must be freed.
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    @rule()
    def begin(self):
        self.live.append(MirroredKV(SHAPE, LIKE, self.journal))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data):
        indices = st.integers(0, len(self.live) - 1)
        tokens = st.lists(st.integers(0, 99), min_size=1, max_size=3)
        parts = [(self.live[n], t) for n, t in data.draw(st.dictionaries(indices, tokens)).items()]
        entries = msgspec.msgpack.decode(msgspec.msgpack.encode(self.journal.take()))
        self.mirror.apply(entries)
        for kv, values in parts:
            append(kv, values)
            append(self.mirror.kv(kv.number), values)
        self.in_sync = True

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        kv = self.drawn(data)
        self.live.append(kv.fork(data.draw(st.integers(0, kv.length))))
        self.in_sync = False

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data):
        kv = self.drawn(data)
        kv.truncate(data.draw(st.integers(0, kv.length)))
        self.in_sync = False

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.in_sync = False

    @invariant()
    def after_a_step_the_mirror_equals_the_kvs_of_the_leader(self):
        if self.in_sync:
            assert len(self.mirror) <= len(self.live)
            for kv in self.live:
                if kv.length:
                    assert values_of(self.mirror.kv(kv.number)) == values_of(kv)


KVMirroring.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25)
TestKVMirroring = KVMirroring.TestCase


def test_a_fork_is_independent():
    journal = KVJournal()
    kv = MirroredKV(SHAPE, LIKE, journal)
    append(kv, [1, 2, 3])
    copy = kv.fork(2)
    append(kv, [4])
    append(copy, [9])
    assert (values_of(kv), values_of(copy)) == ([1, 2, 3, 4], [1, 2, 9])
    assert isinstance(copy, MirroredKV)


def test_an_invalid_journal_entry_is_refused():
    with pytest.raises(ValueError, match="invalid journal entry"):
        KVMirror(lambda: SequenceKV(SHAPE, LIKE)).apply([["swap", 1, 2]])
