"""Hashes of the beginnings of prompts: equal for equal bytes, published once, in bounded tables."""

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cluster import prefix_hashes
from omni_proxy.cluster.messages import PrefixesMessage, encode
from omni_proxy.cluster.prefix_hashes import (
    REPEAT_SECS,
    PrefixHints,
    PrefixNotes,
    beginnings,
    length_of,
    pack_hashes,
    unpack_hashes,
)

A, B = 11, 22  # targets
PROMPT = bytes(range(256)) * 8


def published(notes: PrefixNotes, most: int = 1000) -> dict[int, list[int]]:
    return {target: list(unpack_hashes(each)) for target, each in notes.take(most).items()}


@given(st.binary(max_size=3000), st.binary(max_size=300), st.binary(max_size=300))
def test_texts_share_as_many_beginnings_as_fit_into_their_common_prefix(same, one, other):
    shared = 0
    for first, second in zip(same + one, same + other, strict=False):
        if first != second:
            break
        shared += 1
    pairs = zip(beginnings(same + one), beginnings(same + other), strict=False)
    equal = sum(first == second for first, second in pairs)
    assert length_of(equal) <= shared
    assert equal == prefix_hashes.count_beginnings(shared)


@given(st.lists(st.integers(0, 2**64 - 1)), st.binary(max_size=7))
def test_packed_hashes_are_unpacked_despite_trailing_bytes(hashes, rest):
    assert list(unpack_hashes(pack_hashes(hashes) + rest)) == hashes


def test_a_beginning_is_published_once_per_worker_and_again_after_a_minute():
    notes, hashes = PrefixNotes(), beginnings(PROMPT)
    notes.note(hashes, A, 100.0)
    notes.note(hashes[:3], A, 101.0)
    notes.note(hashes[:2], B, 101.0)
    hashes_by_target = published(notes)
    assert sorted(hashes_by_target[A]) == sorted(hashes)
    assert sorted(hashes_by_target[B]) == sorted(hashes[:2])
    notes.note(hashes, A, 102.0)
    assert published(notes) == {}
    notes.note(hashes[:2], A, 101.0 + REPEAT_SECS)
    assert sorted(published(notes)[A]) == sorted(hashes[:2])


def test_after_a_cache_is_cleared_its_new_beginnings_are_published_again():
    notes, hashes = PrefixNotes(), beginnings(PROMPT)
    notes.note(hashes, A, 100.0)
    notes.forget(A)
    assert published(notes) == {}
    notes.note(hashes[:2], A, 102.0)
    assert sorted(published(notes)[A]) == sorted(hashes[:2])


def test_published_beginnings_are_repeated_for_a_joining_proxy():
    notes, hashes = PrefixNotes(), beginnings(PROMPT)
    notes.note(hashes, A, 100.0)
    first = published(notes)
    notes.repeat()
    again = published(notes)
    assert sorted(again[A]) == sorted(first[A])


def test_notes_are_bounded_and_dropped_beginnings_are_published_at_the_next_use(monkeypatch):
    monkeypatch.setattr(prefix_hashes, "MAX_PENDING", 4)
    notes = PrefixNotes()
    notes.note([1, 2, 3, 4, 5, 6], A, 100.0)
    assert (notes.pending, notes.dropped) == (4, 2)
    first = published(notes)[A]
    notes.note([5, 6], A, 101.0)
    assert sorted(first + published(notes)[A]) == [1, 2, 3, 4, 5, 6]


def test_the_size_of_a_publication_is_bounded():
    notes = PrefixNotes()
    for number in range(4000):
        notes.note([number], number % 10, 100.0)
    message = encode(PrefixesMessage("node/0123", notes.take(512)))
    assert len(message) < 8 * 512 + 10 * 16 + 64
    assert notes.pending == 4000 - 512


def test_hints_list_the_targets_of_the_longest_beginning_first():
    hints, hashes = PrefixHints(), beginnings(PROMPT)
    hints.add({A: pack_hashes(hashes[:2]), B: pack_hashes(hashes)})
    other = beginnings(PROMPT[:1024] + b"x" * 1024)
    assert list(hints.depths(hashes).items()) == [(B, len(hashes)), (A, 2)]
    assert hints.depths(other)[B] == prefix_hashes.count_beginnings(1024)
    hints.forget(B)
    assert hints.depths(hashes) == {A: 2}
    hints.add({B: pack_hashes(hashes[:1])})
    assert hints.depths(hashes) == {A: 2, B: 1}


def test_hints_are_bounded_and_the_least_recently_received_are_dropped():
    hints = PrefixHints(max_entries=3)
    hints.add({A: pack_hashes([1, 2, 3])})
    hints.add({A: pack_hashes([1, 4])})
    assert len(hints) == 3
    assert [bool(hints.depths([number])) for number in (1, 2, 3, 4)] == [True, False, True, True]
    for target in range(100):
        hints.add({target + 1: pack_hashes([9])})
    assert len(hints.depths([9])) == prefix_hashes.MAX_HOLDERS
