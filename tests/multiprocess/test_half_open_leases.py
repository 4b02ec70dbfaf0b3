from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_proxy.multiprocess.half_open_leases import LEASE_SECS, HalfOpenLeases


class Trials(RuleBasedStateMachine):
    """Doors go by what they have heard, which lags; at no time may two think that they hold it."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.leases = HalfOpenLeases()
        self.owes = True
        self.doors = [1, 2, 3]
        self.told = dict.fromkeys(self.doors, 0)  # messages
        self.acked = dict.fromkeys(self.doors, 0)
        self.said = {door: [] for door in self.doors}  # (message, holds it)
        self.believes = dict.fromkeys(self.doors, False)

    def tell(self, door):
        self.told[door] += 1
        # A worker that is out is no door's to try, whoever has the lease.
        self.said[door].append((self.told[door], self.owes and self.leases.holder(7) == door))

    @rule()
    def turn(self):
        here = self.doors
        for door in self.leases.turn(
            [7] if self.owes else [], here, self.now, self.acked.__getitem__
        ):
            self.leases.taken(door, self.told[door] + 1)
            self.tell(door)
        for door in here:
            self.tell(door)

    @rule(secs=st.floats(0, 2 * LEASE_SECS))
    def pass_time(self, secs):
        self.now += secs

    @rule()
    def go_out_or_come_back(self):
        self.owes = not self.owes

    @rule(door=st.sampled_from([1, 2, 3]))
    def hear(self, door):
        for message, holds in self.said[door]:
            self.believes[door] = holds
            self.acked[door] = message
        self.said[door] = []

    @invariant()
    def at_most_one_believes_that_it_may(self):
        assert sum(self.believes.values()) <= 1


TestTrials = Trials.TestCase


def test_the_lease_goes_round_and_each_door_gets_it():
    leases, holders, told = HalfOpenLeases(), [], []

    def acked(door):
        return len(told)

    for step in range(12):
        now = step * LEASE_SECS
        for door in leases.turn([7], [1, 2, 3], now, acked):
            told.append(door)
            leases.taken(door, len(told))
            leases.turn([7], [1, 2, 3], now, acked)
        holders.append(leases.holder(7))
    assert set(holders) == {1, 2, 3}


def test_a_door_that_ended_loses_its_lease_without_a_word():
    leases = HalfOpenLeases()
    leases.turn([7], [1, 2], 0.0, lambda _: 0)
    assert leases.holder(7) == 1
    leases.turn([7], [2], 0.0, lambda _: 0)
    assert leases.holder(7) == 2


def test_a_single_door_keeps_it_and_who_owes_no_more_is_forgotten():
    leases = HalfOpenLeases()
    for now in (0.0, 10.0, 20.0):
        assert not leases.turn([7], [4], now, lambda _: 0)
        assert leases.holder(7) == 4
    assert leases.turn([], [4], 21.0, lambda _: 0) == {4}
    leases.taken(4, 9)
    assert leases.holder(7) is None
    leases.turn([7], [4], 22.0, lambda _: 8)
    assert leases.holder(7) is None
    leases.turn([7], [4], 23.0, lambda _: 9)
    assert leases.holder(7) == 4


def test_a_worker_that_went_out_and_came_back_is_not_given_away_behind_a_doors_back():
    leases, acked = HalfOpenLeases(), {1: 0, 2: 0}
    leases.turn([7], [1, 2], 0.0, acked.__getitem__)
    assert leases.turn([7], [1, 2], LEASE_SECS, acked.__getitem__) == {1}
    leases.taken(1, 5)
    acked[1] = 5
    leases.turn([7], [1, 2], LEASE_SECS, acked.__getitem__)
    assert leases.holder(7) == 2
    assert leases.turn([], [1, 2], LEASE_SECS, acked.__getitem__) == {2}
    leases.taken(2, 8)
    for owed in ([], [7], [7]):
        leases.turn(owed, [1, 2], 9.0, acked.__getitem__)
        assert leases.holder(7) is None
    acked[2] = 8
    leases.turn([7], [1, 2], 9.0, acked.__getitem__)
    assert leases.holder(7) == 1
