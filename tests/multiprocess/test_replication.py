from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_proxy.multiprocess.replication import LEASE_SECS, HalfOpenLeases


class LeaseMachine(RuleBasedStateMachine):
    """Processes act on messages that arrive late; two must never both act as lease holder."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.leases = HalfOpenLeases()
        self.half_open = True
        self.processes = [1, 2, 3]
        self.sent = dict.fromkeys(self.processes, 0)  # messages
        self.acked = dict.fromkeys(self.processes, 0)
        self.unread = {process: [] for process in self.processes}  # (message, holds the lease)
        self.holds_lease = dict.fromkeys(self.processes, False)

    def send_lease(self, process):
        self.sent[process] += 1
        # Without a half-open worker, no process may try it, not even the lease holder.
        self.unread[process].append(
            (self.sent[process], self.half_open and self.leases.holder(7) == process)
        )

    @rule()
    def turn(self):
        processes = self.processes
        for process in self.leases.rotate(
            [7] if self.half_open else [], processes, self.now, self.acked.__getitem__
        ):
            self.leases.revoke(process, self.sent[process] + 1)
            self.send_lease(process)
        for process in processes:
            self.send_lease(process)

    @rule(secs=st.floats(0, 2 * LEASE_SECS))
    def pass_time(self, secs):
        self.now += secs

    @rule()
    def toggle_half_open(self):
        self.half_open = not self.half_open

    @rule(process=st.sampled_from([1, 2, 3]))
    def on_event(self, process):
        for message, holds in self.unread[process]:
            self.holds_lease[process] = holds
            self.acked[process] = message
        self.unread[process] = []

    @invariant()
    def at_most_one_holds_the_lease(self):
        assert sum(self.holds_lease.values()) <= 1


TestLeaseMachine = LeaseMachine.TestCase


def test_the_lease_rotates_over_all_processes():
    leases, holders, sent = HalfOpenLeases(), [], []

    def acked(process):
        return len(sent)

    for step in range(12):
        now = step * LEASE_SECS
        for process in leases.rotate([7], [1, 2, 3], now, acked):
            sent.append(process)
            leases.revoke(process, len(sent))
            leases.rotate([7], [1, 2, 3], now, acked)
        holders.append(leases.holder(7))
    assert set(holders) == {1, 2, 3}


def test_a_process_that_exited_loses_its_lease_at_once():
    leases = HalfOpenLeases()
    leases.rotate([7], [1, 2], 0.0, lambda _: 0)
    assert leases.holder(7) == 1
    leases.rotate([7], [2], 0.0, lambda _: 0)
    assert leases.holder(7) == 2


def test_a_single_process_keeps_the_lease_until_the_worker_has_recovered():
    leases = HalfOpenLeases()
    for now in (0.0, 10.0, 20.0):
        assert not leases.rotate([7], [4], now, lambda _: 0)
        assert leases.holder(7) == 4
    assert leases.rotate([], [4], 21.0, lambda _: 0) == {4}
    leases.revoke(4, 9)
    assert leases.holder(7) is None
    leases.rotate([7], [4], 22.0, lambda _: 8)
    assert leases.holder(7) is None
    leases.rotate([7], [4], 23.0, lambda _: 9)
    assert leases.holder(7) == 4


def test_a_worker_that_was_added_again_is_leased_only_after_the_acknowledgement():
    leases, acked = HalfOpenLeases(), {1: 0, 2: 0}
    leases.rotate([7], [1, 2], 0.0, acked.__getitem__)
    assert leases.rotate([7], [1, 2], LEASE_SECS, acked.__getitem__) == {1}
    leases.revoke(1, 5)
    acked[1] = 5
    leases.rotate([7], [1, 2], LEASE_SECS, acked.__getitem__)
    assert leases.holder(7) == 2
    assert leases.rotate([], [1, 2], LEASE_SECS, acked.__getitem__) == {2}
    leases.revoke(2, 8)
    for owed in ([], [7], [7]):
        leases.rotate(owed, [1, 2], 9.0, acked.__getitem__)
        assert leases.holder(7) is None
    acked[2] = 8
    leases.rotate([7], [1, 2], 9.0, acked.__getitem__)
    assert leases.holder(7) == 1
