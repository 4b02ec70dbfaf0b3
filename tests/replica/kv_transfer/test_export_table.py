import threading
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.replica.kv_transfer.export_table import REMEMBERED, ClaimError, ExportTable

MAX_BYTES, LEASE_SECS = 100, 10.0
KEYS = st.sampled_from(["a", "b", "c", "d"])


@dataclass(frozen=True)
class Stored:
    """Stands for an Export: the table looks at nothing else."""

    key: str
    nbytes: int
    request_id: str = "request"


def table(clock=lambda: 0.0):
    return ExportTable(MAX_BYTES, LEASE_SECS, clock)


class AgainstADictionary(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.table = table(lambda: self.now)
        self.held = {}  # key: (export, when its lease ends, whether it is claimed)

    def expire(self):
        for key, (_, ends_at, claimed) in list(self.held.items()):
            if not claimed and ends_at <= self.now:
                del self.held[key]

    @rule(key=KEYS, nbytes=st.integers(1, 60))
    def keep(self, key, nbytes):
        self.expire()
        export = Stored(key, nbytes)
        total = sum(each.nbytes for each, _, _ in self.held.values())
        fits = key not in self.held and total + nbytes <= MAX_BYTES
        assert self.table.keep(export) is fits
        if fits:
            self.held[key] = (export, self.now + LEASE_SECS, False)

    @rule(key=KEYS)
    def claim(self, key):
        self.expire()
        export, ends_at, claimed = self.held.get(key, (None, 0.0, True))
        if claimed:
            with pytest.raises(ClaimError):
                self.table.claim(key)
        else:
            assert self.table.claim(key) is export
            self.held[key] = (export, ends_at, True)

    @rule(key=KEYS)
    def release(self, key):
        self.table.release(key)
        self.held.pop(key, None)

    @rule(key=KEYS)
    def drop(self, key):
        self.expire()
        self.table.expire()
        count = self.table.drop(lambda export: export.key == key, "dropped")
        assert count == (self.held.pop(key, None) is not None)

    @precondition(lambda self: self.now < 1000)
    @rule(secs=st.sampled_from([1.0, 4.0, 10.0]))
    def wait(self, secs):
        self.now += secs

    @invariant()
    def what_is_held_is_what_was_kept_and_has_a_lease(self):
        self.expire()
        ends = [ends_at for _, ends_at, claimed in self.held.values() if not claimed]
        assert self.table.expire() == (min(ends) - self.now if ends else None)
        assert self.table.nbytes == sum(each.nbytes for each, _, _ in self.held.values())
        assert len(self.table) == len(self.held)


TestAgainstADictionary = AgainstADictionary.TestCase


def test_an_error_reports_the_state_of_the_kv():
    now = [0.0]
    held = table(lambda: now[0])
    with pytest.raises(ClaimError, match="the key is unknown"):
        held.claim("a")
    held.keep(Stored("a", 1))
    held.claim("a")
    with pytest.raises(ClaimError, match="another decode replica"):
        held.claim("a")
    held.release("a")
    with pytest.raises(ClaimError, match="fetched already"):
        held.claim("a")
    held.keep(Stored("b", 1))
    now[0] = LEASE_SECS
    with pytest.raises(ClaimError, match="within 10 s"):
        held.claim("b")
    held.keep(Stored("c", 1))
    held.drop(lambda _: True, "the weights have changed since")
    with pytest.raises(ClaimError, match="weights"):
        held.claim("c")


def test_what_is_remembered_of_the_gone_is_bounded():
    held = table()
    for number in range(REMEMBERED + 10):
        held.keep(Stored(str(number), 1))
        held.release(str(number))
    assert held.gone("0") == ""
    assert held.gone(str(REMEMBERED + 9)) != ""


def test_one_of_many_threads_gets_a_kv():
    held = table()
    held.keep(Stored("a", 1))
    start, won = threading.Barrier(8), []

    def claim():
        start.wait()
        with suppress(ClaimError):
            won.append(held.claim("a"))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
