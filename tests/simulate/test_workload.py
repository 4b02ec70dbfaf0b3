"""Generated workloads, and the best hit rate that a workload allows."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.simulate.workload import (
    BLOCK_TOKENS,
    GROUP,
    WORKLOADS,
    FactsCounter,
    OpenLoop,
    Request,
)


def all_requests(workload):
    """All requests of a workload, if each response ends one second after its request."""
    waiting, done = list(workload.requests), []
    while waiting:
        request = waiting.pop(0)
        done.append(request)
        waiting += workload.next_after(request, request.at + 1.0)
        waiting.sort(key=lambda request: request.at)
    return done


@pytest.mark.parametrize("name", WORKLOADS)
def test_only_equal_seeds_make_equal_requests(name):
    def generated(seed):
        workload = WORKLOADS[name](200, 4, Random(seed))
        return [
            (request.at, request.input_tokens, request.blocks) for request in all_requests(workload)
        ]

    assert generated(1) == generated(1)
    assert generated(1) != generated(2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_the_requested_number_of_requests_with_tokens(name):
    requests = all_requests(WORKLOADS[name](200, 4, Random(1)))
    assert len(requests) == 200
    assert all(request.input_tokens > 0 < request.output_tokens for request in requests)


WITHOUT_BLOCKS = {"uniform", "bursts"}


@pytest.mark.parametrize("name", sorted(WITHOUT_BLOCKS))
def test_prompts_of_uniform_and_bursts_have_no_blocks(name):
    assert not any(request.blocks for request in all_requests(WORKLOADS[name](300, 4, Random(0))))


@pytest.mark.parametrize("name", sorted(WORKLOADS.keys() - WITHOUT_BLOCKS))
def test_blocks_cover_the_prompt(name):
    for request in all_requests(WORKLOADS[name](300, 4, Random(0))):
        assert len(request.blocks) == -(-request.input_tokens // BLOCK_TOKENS)
        sizes = [request.block_size(place) for place in range(len(request.blocks))]
        assert sum(sizes) == request.input_tokens
        assert min(sizes) > 0


def test_a_later_turn_begins_with_the_whole_blocks_of_the_earlier_one():
    turns = {}
    for request in all_requests(WORKLOADS["chats"](200, 4, Random(3))):
        earlier = turns.get(request.session)
        if earlier is not None:
            whole = earlier.input_tokens // BLOCK_TOKENS
            assert request.blocks[:whole] == earlier.blocks[:whole]
            assert request.input_tokens > earlier.input_tokens + earlier.output_tokens
        turns[request.session] = request
    assert len(turns) > 20


def test_a_rollout_has_a_group_of_requests_for_each_prompt():
    requests = WORKLOADS["rollouts"](64, 1, Random(0)).requests
    assert len({request.blocks for request in requests}) == 64 // GROUP


def test_bursts_are_in_one_second_of_each_ten():
    requests = WORKLOADS["bursts"](500, 4, Random(0)).requests
    assert all(request.at % 10 < 1 for request in requests)
    # Four workers get 8 requests per second on average, so each burst has about 80.
    bursts = Counter(request.at // 10 for request in requests)
    assert list(bursts) == list(range(len(bursts)))
    assert len(bursts) in (6, 7, 8)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12))
def test_the_best_possible_hit_rate_counts_leading_blocks_seen_before(prompts):
    counter, blocks, seen, total = FactsCounter(), set(), 0, 0
    for place, prompt in enumerate(prompts):
        path = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        names = tuple(hash(prefix) for prefix in path)
        counter.add(Request(place, max(1, 512 * len(path)), 1, names))
        seen += sum(prefix in blocks for prefix in path)  # with a path, all its prefixes are there
        total += len(path) or 1
        blocks.update(path)
    assert counter.facts().best_possible_hit_rate == pytest.approx(seen / max(1, total))


def test_prompts_without_blocks_have_facts_too():
    counter = FactsCounter()
    for request in OpenLoop([Request(4.0, 1000, 10), Request(1.0, 24, 30)]).requests:
        counter.add(request)
    facts = counter.facts()
    assert (facts.requests, facts.mean_input_tokens, facts.mean_output_tokens) == (2, 512, 20)
    assert (facts.duration_secs, facts.best_possible_hit_rate) == (3.0, 0.0)
