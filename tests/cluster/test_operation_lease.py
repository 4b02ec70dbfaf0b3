"""Acknowledgements of a hold, and the duration of this proxy's own lease."""

from omni_proxy.cluster.operation_lease import Acknowledgements, MemberLease, fencing_token_of


def test_a_member_is_missing_until_it_acknowledges_that_number_or_a_later_one():
    acks = Acknowledgements(3)
    assert acks.missing({"b", "a"}, 1) == ["a", "b"]
    acks.take("a", 3, 2)
    acks.take("b", 3, 1)
    assert acks.missing({"a", "b"}, 2) == ["b"]
    acks.take("a", 3, 1)  # late
    assert acks.missing({"a", "b"}, 2) == ["b"]
    assert acks.missing({"a"}, 2) == []


def test_an_acknowledgement_of_another_holders_state_does_not_count():
    acks = Acknowledgements(3)
    acks.take("a", 2, 9)
    assert acks.missing({"a"}, 1) == ["a"]


def test_a_lease_counts_from_the_time_its_command_was_sent():
    lease = MemberLease()
    assert not lease.holds(0.0, 5.0)
    lease.renewed(10.0)
    assert lease.holds(14.9, 5.0)
    assert not lease.holds(15.0, 5.0)


def test_an_invalid_lease_has_no_token():
    assert fencing_token_of(b"12:one") == 12
    too_high = b"%d:one" % (2**62 + 1)
    for value in (None, b"", b"abc", b"-1:one", b"1" * 5000, too_high, "\u0661:one".encode()):
        assert fencing_token_of(value) == 0
