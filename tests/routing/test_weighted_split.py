import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.schema import AliasTarget, ModelAlias
from omni_proxy.routing.weighted_split import Split

weights = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def split_of(*weights, previous=None, names="abcde"):
    targets = tuple(
        AliasTarget(model=name, weight=weight) for name, weight in zip(names, weights, strict=False)
    )
    return Split(ModelAlias(name="alias", targets=targets), previous)


@given(weights, st.integers(1, 3))
def test_each_target_is_chosen_in_exact_proportion_to_its_weight(weights, rounds):
    split = split_of(*weights)
    indexes = range(len(weights))
    for _ in range(rounds):
        chosen = Counter(split.choose(indexes) for _ in range(sum(weights)))
        assert [chosen[index] for index in indexes] == weights


@given(weights)
def test_the_deviation_of_a_target_from_its_share_is_bounded(weights):
    split, total = split_of(*weights), sum(weights)
    counts = Counter()
    for number in range(1, 2 * total + 1):
        counts[split.choose(range(len(weights)))] += 1
        for index, weight in enumerate(weights):
            assert abs(counts[index] - number * weight / total) < len(weights)


@given(weights, st.data())
def test_a_preview_names_the_next_target_and_changes_nothing(weights, data):
    split = split_of(*weights)
    for _ in range(20):
        available = data.draw(
            st.lists(st.sampled_from(range(len(weights))), min_size=1, unique=True)
        )
        expected = split.preview(available)
        assert split.preview(available) == expected
        assert split.choose(available) == expected
        assert expected in available


def test_a_nine_to_one_split_spreads_the_smaller_share_evenly():
    split = split_of(9, 1)
    chosen = [split.choose((0, 1)) for _ in range(30)]
    places = [number for number, index in enumerate(chosen) if index == 1]
    assert [later - earlier for earlier, later in itertools.pairwise(places)] == [10, 10]


def test_a_target_that_returns_gets_no_more_than_its_share():
    split = split_of(1, 1)
    assert [split.choose((0,)) for _ in range(50)] == [0] * 50
    assert Counter(split.choose((0, 1)) for _ in range(10)) == {0: 5, 1: 5}


def test_a_reload_with_equal_targets_keeps_the_position():
    first = split_of(1, 1)
    before = first.choose((0, 1))
    assert split_of(1, 1, previous=first).choose((0, 1)) != before
    assert split_of(1, 2, previous=first).choose((0, 1)) == 1


SESSIONS = [f"session-{number}" for number in range(3000)]


def homes(split):
    return [split.models[split.session_order(session)[0]] for session in SESSIONS]


def test_sessions_are_spread_by_weight_and_their_order_is_always_the_same():
    counts = Counter(homes(split_of(90, 10)))
    assert counts["b"] == pytest.approx(300, abs=90)
    assert homes(split_of(90, 10)) == homes(split_of(90, 10))
    order = split_of(3, 2, 1).session_order("x")
    assert sorted(order) == [0, 1, 2]


def test_a_changed_weight_moves_sessions_only_to_the_target_that_gained():
    before, after = homes(split_of(90, 10)), homes(split_of(80, 20))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {("a", "b")}
    assert len(moved) == pytest.approx(300, abs=90)


def test_a_new_target_takes_sessions_and_moves_none_between_the_others():
    before, after = homes(split_of(1, 1)), homes(split_of(1, 1, 1))
    moved = {(old, new) for old, new in zip(before, after, strict=True) if old != new}
    assert moved == {("a", "c"), ("b", "c")}


def test_reordering_the_targets_in_the_file_moves_no_session():
    assert homes(split_of(5, 5, names="ab")) == homes(split_of(5, 5, names="ba"))


@given(st.text(), weights)
def test_any_key_has_an_order(session, weights):
    assert sorted(split_of(*weights).session_order(session)) == list(range(len(weights)))
