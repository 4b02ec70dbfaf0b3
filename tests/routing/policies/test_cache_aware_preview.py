"""A preview returns the next pick and its reason, and changes nothing."""

from hypothesis import given
from hypothesis import strategies as st

from tests.routing.policies.chats import (
    FALLBACKS,
    LONG,
    NEED,
    cache_aware,
    chat,
    fleet_with_trees,
    workers,
)

texts = st.sampled_from(["a" * 50, "a" * 30 + "b" * 20, LONG, LONG + "x", "b", ""])


def test_the_reason_names_the_queue_as_tie_breaker():
    policy, fleet = fleet_with_trees((900, 800), (0, 1))
    reason = "a small tree with the shortest queue is taken: 900 bytes"
    assert reason in policy.preview_pick(fleet, chat("0" * 12))[1]


@given(st.lists(st.tuples(texts, st.integers(0, 2)), max_size=25), st.sampled_from(FALLBACKS))
def test_a_preview_equals_the_following_pick_and_changes_nothing(run, fallback):
    policy, fleet = cache_aware(balance_abs_threshold=1, fallback=fallback), workers(0, 0, 0)
    for text, busy in run:
        before = policy.stats()
        previews = {policy.preview_pick(fleet, chat(text))[0] for _ in range(2)}
        policy.explain_pick(fleet, chat(text))
        assert policy.stats() == before
        assert previews == {policy.pick(fleet, chat(text))}
        fleet[busy].in_flight = (fleet[busy].in_flight + 1) % 4


@given(st.lists(st.tuples(texts, st.integers(0, 3)), max_size=25), st.sampled_from(FALLBACKS))
def test_a_preview_of_a_large_fleet_equals_the_following_pick(run, fallback):
    policy, fleet = cache_aware(balance_abs_threshold=1, fallback=fallback), workers(*[0] * 130)
    for text, busy in run:
        previews = {policy.preview_pick(fleet, chat(text))[0] for _ in range(3)}
        assert previews == {policy.pick(fleet, chat(text))}
        fleet[0].in_flight = busy


def test_a_pick_of_a_large_fleet_does_not_reuse_the_imbalance_of_a_preview():
    policy, fleet = cache_aware(balance_abs_threshold=1), workers(*[0] * 130)
    policy.record_pick(fleet[5], chat(LONG))
    fleet[5].in_flight = 9
    assert policy.preview_pick(fleet, chat(LONG))[1].startswith("loads differ")
    fleet[5].in_flight = 0
    assert policy.pick(fleet, chat(LONG)) is fleet[5]


def test_the_reason_of_a_preview_is_a_sentence():
    policy, fleet = cache_aware(balance_abs_threshold=4), workers(0, 0)
    assert "the smallest tree is taken: 0 bytes" in policy.preview_pick(fleet, chat("x" * 30))[1]
    policy.pick(fleet[:1], chat("x" * 30))
    assert policy.preview_pick(fleet, chat("x" * 30))[1] == "30 of 30 bytes match, held by w0:1"
    assert policy.explain_pick(fleet, chat("x" * 20)) == {
        "text_bytes": 20,
        "matched_bytes": {fleet[0].url: 20, fleet[1].url: 0},
    }
    fleet[0].in_flight = 9
    assert policy.preview_pick(fleet, chat("x" * 30))[1].startswith("loads differ")
    assert policy.preview_pick(fleet, NEED)[1].startswith("the request has no text")
