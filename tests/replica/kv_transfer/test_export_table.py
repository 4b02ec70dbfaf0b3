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
    """Replaces an Export. The table reads no other attributes."""

    key: str
    nbytes: int
    request_id: str = "request"


def table(clock=lambda: 0.0):
    return ExportTable(MAX_BYTES, LEASE_SECS, clock)


class ExportTableAgainstModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.table = table(lambda: self.now)
        self.held = {}  # key: (export, end of its lease, whether it is claimed)

    def expire(self):
        for key, (_, ends_at, claimed) in list(self.held.items()):
            if not claimed and ends_at <= self.now:
                del self.held[key]

    @rule(key=KEYS, nbytes=st.integers(1, 60))
    def keep(self, key, nbytes):
        self.expire()
        export = Stored(key, nbytes)
        total = sum(export.nbytes for export, _, _ in self.held.values())
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
        dropped = self.table.drop(lambda export: export.key == key, "dropped")
        assert dropped == (self.held.pop(key, None) is not None)

    @precondition(lambda self: self.now < 1000)
    @rule(secs=st.sampled_from([1.0, 4.0, 10.0]))
    def wait(self, secs):
        self.now += secs

    @invariant()
    def the_table_holds_what_was_kept_and_not_released_or_expired(self):
        self.expire()
        ends = [ends_at for _, ends_at, claimed in self.held.values() if not claimed]
        assert self.table.expire() == (min(ends) - self.now if ends else None)
        assert self.table.nbytes == sum(export.nbytes for export, _, _ in self.held.values())
        assert len(self.table) == len(self.held)


TestExportTableAgainstModel = ExportTableAgainstModel.TestCase


def test_an_error_reports_the_state_of_the_kv():
    now = [0.0]
    exports = table(lambda: now[0])
    with pytest.raises(ClaimError, match="the key is unknown"):
        exports.claim("a")
    exports.keep(Stored("a", 1))
    exports.claim("a")
    with pytest.raises(ClaimError, match="another decode replica"):
        exports.claim("a")
    exports.release("a")
    with pytest.raises(ClaimError, match="fetched already"):
        exports.claim("a")
    exports.keep(Stored("b", 1))
    now[0] = LEASE_SECS
    with pytest.raises(ClaimError, match="within 10 s"):
        exports.claim("b")
    exports.keep(Stored("c", 1))
    exports.drop(lambda _: True, "the weights have changed since")
    with pytest.raises(ClaimError, match="weights"):
        exports.claim("c")


def test_the_history_of_removed_exports_is_bounded():
    exports = table()
    for number in range(REMEMBERED + 10):
        exports.keep(Stored(str(number), 1))
        exports.release(str(number))
    assert exports.gone("0") == ""
    assert exports.gone(str(REMEMBERED + 9)) != ""


def test_only_one_of_several_threads_can_claim_a_kv():
    exports = table()
    exports.keep(Stored("a", 1))
    start, claimed = threading.Barrier(8), []

    def claim():
        start.wait()
        with suppress(ClaimError):
            claimed.append(exports.claim("a"))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == 1
