"""Session places: proxies that received the same messages agree, whatever the order."""

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cluster import session_places
from omni_proxy.cluster.session_places import (
    FINISHED,
    ROW_BYTES,
    PlacedSessions,
    SessionNotes,
    session_digest,
)

S, T = session_digest("s"), session_digest("t")


def test_of_two_concurrent_placements_the_later_one_wins_at_both_proxies():
    one, two = PlacedSessions(), PlacedSessions()
    from_one, from_two = one.place({S: 1}, 1000), two.place({S: 2}, 1001)
    assert one.receive(from_two) == {S: 2}
    assert two.receive(from_one) == {}


def test_a_placement_made_after_receiving_another_wins_whatever_the_clocks():
    one, two = PlacedSessions(), PlacedSessions()
    two.receive(one.place({S: 1}, 2000))
    assert one.receive(two.place({S: 2}, 1000)) == {S: 2}


def test_a_session_in_use_is_published_again_without_being_moved():
    one, two = PlacedSessions(), PlacedSessions()
    two.receive(one.place({S: 1}, 1000))
    moved = two.place({S: 2}, 1500)
    assert two.receive(one.place({S: 1}, 2000)) == {}
    assert one.receive(moved) == {S: 2}
    assert two.receive(one.place({S: 2}, 3000)) == {
        S: 2
    }  # so that the session does not expire there


def test_a_joining_proxy_gets_all_unfinished_sessions():
    one, two = PlacedSessions(), PlacedSessions()
    one.place({S: 1, T: 2}, 1000)
    one.place({T: FINISHED}, 1001)
    assert two.receive(one.newest()) == {S: 1}


def test_tables_are_bounded(monkeypatch):
    monkeypatch.setattr(session_places, "MAX_PENDING", 3)
    notes, placed = SessionNotes(), PlacedSessions(max_entries=4)
    for number in range(6):
        notes.note(session_digest(str(number)), 1)
    assert (notes.pending, notes.dropped) == (3, 3)
    rows = placed.place({session_digest(str(number)): 7 for number in range(6)}, 1)
    assert len(placed) == 4
    assert len(rows[7]) == 6 * ROW_BYTES


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([S, T]), st.integers(0, 3), st.integers(1, 9)),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_proxies_agree_when_each_has_received_all_messages(steps, order):
    proxies = [PlacedSessions() for _ in range(3)]
    inboxes = [[], [], []]
    for number, digest, target, stamp in steps:
        rows = proxies[number].place({digest: target}, stamp)
        for other in {0, 1, 2} - {number}:
            inboxes[other].append(rows)
    for proxy, messages in zip(proxies, inboxes, strict=True):
        order.shuffle(messages)
        for rows in messages:
            proxy.receive(rows)
    first, second, third = (dict(proxy._known) for proxy in proxies)
    assert first == second == third


def test_rows_of_another_length_are_ignored():
    assert PlacedSessions().receive({1: b"x" * (ROW_BYTES - 1)}) == {}
