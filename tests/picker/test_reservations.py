from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_proxy.picker.reservations import Reservations
from tests.example_counts import examples

IDS = st.sampled_from("abcdef")


class NaiveReservations(RuleBasedStateMachine):
    """Compares reservations with a plain list. Items are unique numbers."""

    def __init__(self):
        super().__init__()
        self.real = Reservations()
        self.held = []  # (end of the lease, item, id), in order of creation
        self.now, self.created, self.released = 0.0, 0, []

    @rule(name=IDS, secs=st.integers(0, 5))
    def reserve(self, name, secs):
        self.created += 1
        if any(name == other for _, _, other in self.held):
            with pytest.raises(KeyError):
                self.real.add(name, self.created, self.now + secs)
            return
        self.real.add(name, self.created, self.now + secs)
        self.held.append((self.now + secs, self.created, name))

    @rule(name=IDS)
    def release(self, name):
        [reservation] = [each for each in self.held if each[2] == name] or [None]
        assert self.real.release(name) == (reservation and reservation[1])
        if reservation:
            self.held.remove(reservation)
            self.released.append(reservation[1])

    @rule(secs=st.integers(0, 4))
    def advance_time(self, secs):
        self.now += secs
        ended = sorted(each for each in self.held if each[0] <= self.now)
        assert self.real.expire(self.now) == [item for _, item, _ in ended]
        self.held = [each for each in self.held if each not in ended]
        self.released += [item for _, item, _ in ended]

    @rule()
    def end(self):
        assert sorted(self.real.take_all()) == sorted(item for _, item, _ in self.held)
        self.released += [item for _, item, _ in self.held]
        self.held = []

    @invariant()
    def both_agree(self):
        assert len(self.real) == len(self.held)
        assert self.real.next_end() == min((end for end, _, _ in self.held), default=inf)
        assert all(self.real.get(name) == item for _, item, name in self.held)
        rows = [(end, item, name) for name, item, end in self.real.rows()]
        assert rows == sorted(self.held)
        assert len(self.released) == len(set(self.released))


TestReservations = NaiveReservations.TestCase
TestReservations.settings = settings(max_examples=examples(40), stateful_step_count=30)


def test_a_released_reservation_takes_no_memory_until_its_lease_would_end():
    reservations = Reservations()
    for number in range(1000):
        reservations.add(str(number), number, 1e9)
        reservations.release(str(number))
    assert len(reservations._ends) < 100
