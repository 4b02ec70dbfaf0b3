"""The cost model of cache_aware: the fewest prompt tokens to wait for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.schema import CacheAwareConfig, RoutingConfig
from omni_proxy.routing.cache_prediction import CacheReports, note_first_byte
from omni_proxy.routing.inspect.body_fields import body_fields_of
from omni_proxy.routing.inspect.prefix_text import LIMIT
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.cache_cost import EXACT, PromptCost, cheapest, count_prompt_tokens
from tests.routing.policies.chats import branch_of, cache_aware, chat, workers

TEXT = "t" * 4000  # a thousand tokens
RULES = {"score": "cost", "spill": "chosen", "uncached_weight": 1.0, "request_cost_tokens": 100}


def cost_policy(*loads, **rules):
    return cache_aware(**(RULES | rules)), workers(*loads)


def backlog(policy, worker):
    return policy.explain_pick([worker], chat("x"))["cost"][worker.url]["backlog_tokens"]


def send(policy, worker, request):
    policy.pick([worker], request)
    return request.prediction


def test_an_idle_worker_is_picked_if_the_holder_has_more_tokens_to_compute():
    policy, (holder, idle) = cost_policy(0, 0)
    note_first_byte(send(policy, holder, chat(TEXT)))
    holder.in_flight = 9
    assert policy.pick([holder, idle], chat(TEXT)) is holder  # 900 tokens against 1,000
    note_first_byte(send(policy, idle, chat("another")))
    policy.forget_worker(idle)
    holder.in_flight = 11
    assert policy.preview_pick([holder, idle], chat(TEXT))[0] is idle


def test_an_uncomputed_prompt_is_backlog_until_its_first_byte():
    policy, (one, other) = cost_policy(0, 0)
    waiting = send(policy, one, chat(TEXT))
    assert backlog(policy, one) == 1000
    assert policy.pick([one, other], chat("short")) is other
    note_first_byte(waiting)
    note_first_byte(waiting)
    assert backlog(policy, one) == 0
    again = send(policy, one, chat(TEXT))  # the prompt is cached
    assert (backlog(policy, one), again.uncached) == (0, 0)


def test_a_retry_counts_as_backlog_only_at_its_new_worker():
    policy, (one, other) = cost_policy(0, 0)
    request = chat(TEXT)
    send(policy, one, request)
    send(policy, other, request)
    assert (backlog(policy, one), backlog(policy, other)) == (0, 1000)


def test_the_gate_moves_a_request_if_the_chosen_worker_has_too_much_load():
    policy, fleet = cost_policy(0, 0, balance_abs_threshold=2, request_cost_tokens=0)
    note_first_byte(send(policy, fleet[0], chat(TEXT)))
    fleet[0].in_flight = 9
    assert policy.pick(fleet, chat(TEXT)) is fleet[1]
    assert branch_of(policy) == {"cost": 1, "spilled": 1}


def test_a_preview_changes_nothing_and_explains_the_cost():
    policy, fleet = cost_policy(2, 0)
    send(policy, fleet[0], chat(TEXT))
    stats = policy.stats()
    worker, reason = policy.preview_pick(fleet, chat(TEXT + "u" * 400))
    assert worker is fleet[1]
    assert reason.startswith("the lowest cost: 1100 tokens to compute, 0 before them")
    explained = policy.explain_pick(fleet, chat(TEXT + "u" * 400))["cost"]
    assert explained[fleet[0].url] == {  # 9 tokens: the known text does not end with a whole block
        "uncached_tokens": 109, "backlog_tokens": 1000, "in_flight_tokens": 200,
    }  # fmt: skip
    assert policy.stats() == stats


def test_the_explained_cost_includes_the_load_of_other_proxies():
    policy, fleet = cost_policy(2, 0)
    fleet[1].load_offset = 3.5
    worker, _ = policy.preview_pick(fleet, chat(TEXT))
    explained = policy.explain_pick(fleet, chat(TEXT))["cost"]
    assert worker is fleet[0]
    assert [explained[member.url]["in_flight_tokens"] for member in fleet] == [200, 350]


def test_the_backlog_is_counted_without_feedback_until_the_score_changes():
    policy, (worker,) = cost_policy(0, feedback=False)
    waiting = send(policy, worker, chat(TEXT))
    assert backlog(policy, worker) == 1000
    rules = CacheAwareConfig(feedback=False)
    assert policy.reconfigure(RoutingConfig(policy="cache_aware", cache_aware=rules))
    assert send(policy, worker, chat(TEXT)) is None
    note_first_byte(waiting)
    assert waiting.reports.backlog == 0


def test_the_whole_prompt_counts_if_its_text_is_cut():
    long_request = chat("t" * 3 * LIMIT)
    assert 3 * LIMIT // 4 <= count_prompt_tokens(LIMIT - 1, long_request) < 3 * LIMIT // 4 + 50
    assert count_prompt_tokens(400, long_request) == 100
    assert count_prompt_tokens(LIMIT - 1, Requirements(0, decoded=body_fields_of({}))) == LIMIT // 4


@pytest.mark.parametrize("weights", [(1, 1), (1, 3)])
def test_equal_workers_are_picked_in_turn_and_heavier_ones_more_often(weights):
    policy, fleet = cost_policy(0, 0)
    for worker, weight in zip(fleet, weights, strict=True):
        worker.weight = weight
    picked = []
    for number in range(8):
        worker = policy.pick(fleet, chat(f"{number}" * 400))
        picked.append(worker)
    shares = [picked.count(worker) for worker in fleet]
    assert shares == ([4, 4] if weights == (1, 1) else [2, 6])


NUMBERS = st.integers(0, 5000)


@given(
    st.integers(1, 5000),
    st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 9), st.integers(1, 3)), min_size=1,
             max_size=9),
    st.integers(0, 7),
)  # fmt: skip
def test_the_worker_with_the_lowest_cost_by_the_formula_is_picked(tokens, states, turn):
    fleet = workers(*[in_flight for _, _, in_flight, _ in states])
    reports, held = {}, {}
    for worker, (held_tokens, waiting, _, weight) in zip(fleet, states, strict=True):
        worker.weight = weight
        reports[worker] = CacheReports()
        reports[worker].backlog = waiting
        held[worker] = held_tokens * 4
    rules = CacheAwareConfig(uncached_weight=2.0, request_cost_tokens=10)
    cost = PromptCost(tokens, held, reports, rules)
    costs = [
        (2 * max(0, tokens - held_tokens) + waiting + 10 * in_flight) / weight
        for held_tokens, waiting, in_flight, weight in states
    ]
    worker, ties = cheapest(cost, fleet, turn)
    assert costs[fleet.index(worker)] == min(costs)
    assert ties == costs.count(min(costs))


def test_in_a_large_fleet_the_cost_of_a_holder_is_always_computed():
    fleet = workers(*[0] * (3 * EXACT))
    rules = CacheAwareConfig()
    for holder in (fleet[0], fleet[EXACT + 1], fleet[-1]):
        cost = PromptCost(1000, {holder: 4000}, {}, rules)
        assert {cheapest(cost, fleet, turn)[0] for turn in range(5)} == {holder}
    without_holders = PromptCost(1000, {}, {}, rules)
    assert {cheapest(without_holders, fleet, turn)[0] for turn in range(3 * EXACT)} == set(fleet)
