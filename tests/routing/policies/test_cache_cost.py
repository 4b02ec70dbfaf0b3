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


def by_cost(*loads, **rules):
    return cache_aware(**(RULES | rules)), workers(*loads)


def backlog(policy, worker):
    return policy.explain_pick([worker], chat("x"))["cost"][worker.url]["backlog_tokens"]


def sent(policy, worker, request):
    policy.pick([worker], request)
    return request.prediction


def test_an_idle_worker_computes_the_prompt_rather_than_one_that_has_it_and_much_to_do():
    policy, (holder, idle) = by_cost(0, 0)
    note_first_byte(sent(policy, holder, chat(TEXT)))
    holder.in_flight = 9
    assert policy.pick([holder, idle], chat(TEXT)) is holder  # 900 tokens against 1,000
    note_first_byte(sent(policy, idle, chat("another")))
    policy.forget_worker(idle)
    holder.in_flight = 11
    assert policy.preview_pick([holder, idle], chat(TEXT))[0] is idle


def test_prompts_that_are_not_computed_yet_are_a_backlog_until_their_first_byte():
    policy, (one, other) = by_cost(0, 0)
    waiting = sent(policy, one, chat(TEXT))
    assert backlog(policy, one) == 1000
    assert policy.pick([one, other], chat("short")) is other
    note_first_byte(waiting)
    note_first_byte(waiting)
    assert backlog(policy, one) == 0
    again = sent(policy, one, chat(TEXT))  # it has the prompt: nothing is to be computed
    assert (backlog(policy, one), again.uncached) == (0, 0)


def test_a_request_that_is_sent_again_is_a_backlog_at_its_new_worker_alone():
    policy, (one, other) = by_cost(0, 0)
    request = chat(TEXT)
    sent(policy, one, request)
    sent(policy, other, request)
    assert (backlog(policy, one), backlog(policy, other)) == (0, 1000)


def test_the_gate_sends_a_request_elsewhere_where_the_chosen_worker_has_too_much():
    policy, fleet = by_cost(0, 0, balance_abs_threshold=2, request_cost_tokens=0)
    note_first_byte(sent(policy, fleet[0], chat(TEXT)))
    fleet[0].in_flight = 9
    assert policy.pick(fleet, chat(TEXT)) is fleet[1]
    assert branch_of(policy) == {"cost": 1, "spilled": 1}


def test_a_preview_changes_nothing_and_explains_the_cost():
    policy, fleet = by_cost(2, 0)
    sent(policy, fleet[0], chat(TEXT))
    stats = policy.stats()
    worker, reason = policy.preview_pick(fleet, chat(TEXT + "u" * 400))
    assert worker is fleet[1]
    assert reason.startswith("the lowest cost: 1100 tokens to compute, 0 before them")
    explained = policy.explain_pick(fleet, chat(TEXT + "u" * 400))["cost"]
    assert explained[fleet[0].url] == {  # nine: the end of the known text is no whole block
        "uncached_tokens": 109, "backlog_tokens": 1000, "in_flight_tokens": 200,
    }  # fmt: skip
    assert policy.stats() == stats


def test_the_explained_cost_has_the_load_of_other_proxies_as_the_compared_one():
    policy, fleet = by_cost(2, 0)
    fleet[1].load_offset = 3.5
    worker, _ = policy.preview_pick(fleet, chat(TEXT))
    explained = policy.explain_pick(fleet, chat(TEXT))["cost"]
    assert worker is fleet[0]
    assert [explained[each.url]["in_flight_tokens"] for each in fleet] == [200, 350]


def test_the_backlog_is_counted_without_feedback_and_goes_when_the_score_changes():
    policy, (worker,) = by_cost(0, feedback=False)
    waiting = sent(policy, worker, chat(TEXT))
    assert backlog(policy, worker) == 1000
    rules = CacheAwareConfig(feedback=False)
    assert policy.reconfigure(RoutingConfig(policy="cache_aware", cache_aware=rules))
    assert sent(policy, worker, chat(TEXT)) is None
    note_first_byte(waiting)
    assert waiting.reports.backlog == 0


def test_all_of_a_prompt_counts_where_its_text_is_cut():
    long = chat("t" * 3 * LIMIT)
    assert 3 * LIMIT // 4 <= count_prompt_tokens(LIMIT - 1, long) < 3 * LIMIT // 4 + 50
    assert count_prompt_tokens(400, long) == 100
    assert count_prompt_tokens(LIMIT - 1, Requirements(0, decoded=body_fields_of({}))) == LIMIT // 4


@pytest.mark.parametrize("weights", [(1, 1), (1, 3)])
def test_equal_workers_take_turns_and_a_heavier_one_gets_more(weights):
    policy, fleet = by_cost(0, 0)
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
def test_the_lowest_cost_wins_as_by_the_formula(tokens, states, turn):
    fleet = workers(*[in_flight for _, _, in_flight, _ in states])
    reports, held = {}, {}
    for worker, (held_tokens, waiting, _, weight) in zip(fleet, states, strict=True):
        worker.weight = weight
        reports[worker] = CacheReports()
        reports[worker].backlog = waiting
        held[worker] = held_tokens * 4
    rules = CacheAwareConfig(uncached_weight=2.0, request_cost_tokens=10)
    cost = PromptCost(tokens, held, reports, rules)
    naive = [
        (2 * max(0, tokens - held_tokens) + waiting + 10 * in_flight) / weight
        for held_tokens, waiting, in_flight, weight in states
    ]
    worker, ties = cheapest(cost, fleet, turn)
    assert naive[fleet.index(worker)] == min(naive)
    assert ties == naive.count(min(naive))


def test_in_a_large_fleet_a_holder_is_always_looked_at():
    fleet = workers(*[0] * (3 * EXACT))
    rules = CacheAwareConfig()
    for holder in (fleet[0], fleet[EXACT + 1], fleet[-1]):
        cost = PromptCost(1000, {holder: 4000}, {}, rules)
        assert {cheapest(cost, fleet, turn)[0] for turn in range(5)} == {holder}
    nobody = PromptCost(1000, {}, {}, rules)
    assert {cheapest(nobody, fleet, turn)[0] for turn in range(3 * EXACT)} == set(fleet)
