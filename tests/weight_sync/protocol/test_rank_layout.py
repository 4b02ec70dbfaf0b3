import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.weight_sync.protocol.rank_layout import RankLayoutError, assign_ranks, count_ranks

RANKS = st.lists(st.integers(1, 8), min_size=1, max_size=6).map(
    lambda counts: {f"http://{at}": count for at, count in enumerate(counts)}
)


@given(RANKS, st.integers(-2, 12), st.integers(0, 60))
def test_a_layout_assigns_each_rank_once_and_none_outside_the_group(ranks, offset, world):
    fits = offset >= 1 and offset + sum(ranks.values()) <= world
    try:
        layout = assign_ranks(offset, world, ranks)
    except RankLayoutError:
        assert not fits
        return
    assert fits
    assigned = [
        rank_range.offset + at for rank_range in layout for at in range(rank_range.rank_count)
    ]
    assert assigned == list(range(offset, offset + sum(ranks.values())))
    assert {rank_range.name: rank_range.rank_count for rank_range in layout} == ranks


def test_ranks_that_do_not_fit_are_refused_with_the_sum():
    with pytest.raises(RankLayoutError) as refused:
        assign_ranks(4, 4, {"http://a": 2, "http://b": 1})
    message = str(refused.value)
    assert "rank_offset 4 + 3 ranks" in message
    assert "http://a: 2, http://b: 1" in message
    assert "= 7, but world_size is 4" in message


def test_rank_zero_cannot_be_assigned():
    with pytest.raises(RankLayoutError, match="rank_offset 0"):
        assign_ranks(0, 9, {"http://a": 1})


@pytest.mark.parametrize("ranks", [{}, {"http://a": 0}])
def test_a_participant_without_ranks_is_refused(ranks):
    with pytest.raises(RankLayoutError, match="at least one rank"):
        assign_ranks(1, 9, ranks)


@pytest.mark.parametrize(
    ("info", "ranks"),
    [({"tp_size": 2}, 2), ({"tp_size": 0}, 1), ({"tp_size": True}, 1), ({}, 1), (None, 1)],
)
def test_a_server_that_reports_no_ranks_counts_as_one_rank(info, ranks):
    assert count_ranks(info) == ranks
