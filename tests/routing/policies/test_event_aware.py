"""Prompts of token ids go to workers whose events show their blocks, others as `cache_aware`."""

import msgspec
import pytest

from omni_proxy.config.parse import parse
from omni_proxy.routing.inspect.body_fields import BodyFields
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.kv_events.block_index import PREDICTED_SECS, BlockIndex
from omni_proxy.routing.kv_events.block_keys import block_keys
from omni_proxy.routing.kv_events.engine_blocks import ChangeOp, HeldChange
from omni_proxy.routing.policies import build_policy
from omni_proxy.routing.policies.event_aware import RECENT
from tests.routing.policies.chats import chat, workers

SIZE = 4
PROMPT = list(range(40))
EVENTS = '[routing]\npolicy = "cache_aware"\n[routing.cache_aware]\nsource = "events"\n'


def policy_of(index, config=EVENTS):
    policy = build_policy(parse(config).routing, lambda n: 0, 0.0)
    policy.use_blocks(index)
    return policy


def tokens(ids, key="prompt", **fields):
    return Requirements(0, decoded=BodyFields(**{key: msgspec.Raw(str(ids).encode())}), **fields)


def exact(index, worker, *prompts, size=SIZE):
    changes = [HeldChange(ChangeOp.EXACT, []), HeldChange(ChangeOp.BLOCK_SIZE, [size])]
    changes += [HeldChange(ChangeOp.STORE, list(block_keys(prompt, size))) for prompt in prompts]
    index.apply(worker.url, changes)


@pytest.fixture
def index():
    return BlockIndex()


@pytest.mark.parametrize("key", ["prompt", "input_ids", "token_ids"])
def test_a_prompt_goes_to_the_worker_that_has_its_blocks(index, key):
    policy, fleet = policy_of(index), workers(0, 0, 0)
    for worker in fleet:
        exact(index, worker, [9] * 8)
    exact(index, fleet[1], PROMPT)
    exact(index, fleet[2], PROMPT[:20])
    need = tokens([*PROMPT, 1, 2], key)
    worker, reason = policy.preview_pick(fleet, need)
    assert (worker, reason) == (
        fleet[1],
        f"40 of 42 tokens are cached, held by {fleet[1].display_id}",
    )
    assert policy.pick(fleet, need) is fleet[1]
    facts = policy.explain_pick(fleet, need)
    assert facts["prompt_tokens"] == 42
    assert facts["matched_tokens"] == dict(zip([w.url for w in fleet], [0, 40, 20], strict=True))


def test_a_share_at_the_threshold_does_not_decide(index):
    policy, fleet = policy_of(index), workers(0, 5)
    exact(index, fleet[0])
    exact(index, fleet[1], PROMPT[:20])
    assert policy.preview_pick(fleet, tokens(PROMPT))[0] is fleet[0]
    assert policy.preview_pick(fleet, tokens(PROMPT[:39]))[0] is fleet[1]


def test_a_prompt_that_was_just_sent_counts_as_cached(index):
    policy, fleet = policy_of(index), workers(0, 0)
    for worker in fleet:
        exact(index, worker, [9] * 4)
    home = policy.pick(fleet, tokens(PROMPT))
    home.in_flight += 1
    assert policy.pick(fleet, tokens(PROMPT)) is home
    policy.maintain(2 * PREDICTED_SECS)
    assert policy.preview_pick(fleet, tokens(PROMPT))[0] is not home


def test_the_cache_of_a_worker_without_events_is_inferred_from_its_requests(index):
    policy, fleet = policy_of(index), workers(0, 0)
    exact(index, fleet[0], PROMPT[:20])
    policy.record_pick(fleet[1], tokens(PROMPT))
    assert policy.preview_pick(fleet, tokens(PROMPT))[0] is fleet[1]
    exact(index, fleet[0], PROMPT)
    assert policy.preview_pick(fleet, tokens([*PROMPT, *PROMPT]))[0] is fleet[0]


def test_blocks_of_a_worker_that_is_no_longer_exact_are_not_matched(index):
    policy, fleet = policy_of(index), workers(0, 5)
    exact(index, fleet[0])
    exact(index, fleet[1], PROMPT)
    assert policy.preview_pick(fleet, tokens(PROMPT))[0] is fleet[1]
    index.apply(fleet[1].url, [HeldChange(ChangeOp.INEXACT, [])])
    assert policy.preview_pick(fleet, tokens(PROMPT))[0] is fleet[0]


def test_workers_may_have_blocks_of_different_sizes(index):
    policy, fleet = policy_of(index), workers(0, 0)
    exact(index, fleet[0], PROMPT, size=8)
    exact(index, fleet[1], PROMPT[:32])
    assert policy.preview_pick(fleet, tokens(PROMPT))[0] is fleet[0]
    exact(index, fleet[1], [*PROMPT, *PROMPT])
    assert policy.preview_pick(fleet, tokens(PROMPT[:36]))[0] is fleet[1]


def test_a_prompt_that_only_ends_like_an_earlier_one_is_no_match(index):
    policy, fleet = policy_of(index), workers(0, 0)
    for worker, prompt in zip(fleet, (PROMPT, [77, *PROMPT[1:]]), strict=True):
        exact(index, worker, prompt)
    for _ in range(2):
        assert policy.pick(fleet, tokens(PROMPT)) is fleet[0]
        assert policy.pick(fleet, tokens([77, *PROMPT[1:]])) is fleet[1]


def test_the_number_of_remembered_prompts_is_bounded(index):
    policy, fleet = policy_of(index), workers(0)
    exact(index, fleet[0], PROMPT)
    for first in range(2 * RECENT):
        policy.pick(fleet, tokens([first] * 50))
    assert policy.remembered_prompts == RECENT


def test_texts_are_matched_in_the_tree(index):
    policy, fleet = policy_of(index), workers(0, 0)
    for worker in fleet:
        exact(index, worker, PROMPT)
    home = policy.pick(fleet, chat("a" * 100))
    home.in_flight += 1
    assert policy.pick(fleet, chat("a" * 100)) is home
    assert "bytes match" in policy.preview_pick(fleet, chat("a" * 100))[1]


def test_a_request_for_an_adapter_is_matched_in_the_tree(index):
    policy, fleet = policy_of(index), workers(0, 0)
    for worker in fleet:
        exact(index, worker, PROMPT)
        worker.adapters = frozenset(("sql",))
    assert "bytes match" in policy.preview_pick(fleet, tokens(PROMPT, model="sql"))[1]
    assert "tokens" in policy.preview_pick(fleet, tokens(PROMPT, model="base"))[1]


def test_load_decides_if_it_differs_too_much(index):
    policy, fleet = policy_of(index), workers(0, 100)
    exact(index, fleet[0])
    exact(index, fleet[1], PROMPT)
    worker, reason = policy.preview_pick(fleet, tokens(PROMPT))
    assert worker is fleet[0]
    assert "loads differ" in reason


def test_the_source_can_be_changed_while_requests_run(index):
    policy, fleet = policy_of(index), workers(0, 5)
    exact(index, fleet[0])
    exact(index, fleet[1], PROMPT)
    inferred = parse(EVENTS.replace('"events"', '"inferred"')).routing
    assert policy.reconfigure(inferred)
    assert policy.preview_pick(fleet, tokens(PROMPT))[0] is fleet[0]
    assert policy.reconfigure(parse(EVENTS).routing)
    assert policy.preview_pick(fleet, tokens(PROMPT))[0] is fleet[1]


def test_the_cached_share_of_a_text_is_that_of_its_tokens(index):
    policy, fleet = policy_of(index), workers(0, 0)
    exact(index, fleet[0], PROMPT[:20])
    exact(index, fleet[1])
    text, cached = policy.cached_prefix(fleet, tokens(PROMPT))
    assert cached == {fleet[0]: (len(text) - 1) // 2}


@pytest.mark.parametrize(("busy", "chosen"), [((3, 1), 1), ((0, 1), 0)])
def test_without_a_match_the_shortest_queue_is_picked_if_all_caches_are_known(index, busy, chosen):
    policy, fleet = policy_of(index), workers(*busy)
    for worker in fleet:
        exact(index, worker, [9] * 8)
    policy.record_pick(fleet[1 - chosen], chat("a" * 100))
    policy.record_pick(
        fleet[chosen], chat("b" * 5000)
    )  # a larger tree, which may be partly evicted
    worker, reason = policy.preview_pick(fleet, tokens(PROMPT))
    assert worker is fleet[chosen]
    assert "the shortest queue is taken" in reason
    policy.pick(fleet, tokens(PROMPT))
    assert policy.stats()["picks"] == {"least_loaded": 1}


def test_without_a_match_trees_are_compared_if_a_cache_is_not_known(index):
    policy, fleet = policy_of(index), workers(0, 1)
    exact(index, fleet[0])
    assert policy.pick(fleet, tokens([7] * 400)) is fleet[0]
    assert policy.preview_pick(fleet, tokens(PROMPT))[0] is fleet[1]
    exact(index, fleet[1])
    assert policy.preview_pick(fleet, tokens(PROMPT))[0] is fleet[0]


def test_the_known_blocks_are_compared_with_the_reports_of_responses(index):
    policy, fleet = policy_of(index), workers(0, 0)
    exact(index, fleet[0], PROMPT[:32])
    exact(index, fleet[1])
    need = tokens(PROMPT)
    assert policy.pick(fleet, need) is fleet[0]
    prediction = need.prediction
    assert prediction.learner.learn(prediction, 28, len(PROMPT), 0) == 32
    facts = policy.explain_pick(fleet, need)["cache_reports"]
    assert facts == {fleet[0].url: {"answers": 1, "predicted_tokens": 32, "reported_tokens": 28}}
    assert policy.stats()["corrections"] == 0  # an exact state is not corrected by responses
    fleet[0].in_flight = 100  # so the other worker gets it, which has no block
    assert policy.pick(fleet, need) is fleet[1]
    assert (need.prediction.worker, need.prediction.cached_tokens) == (fleet[1], 0)


def test_without_feedback_there_is_no_prediction(index):
    policy, fleet = policy_of(index, EVENTS + "feedback = false\n"), workers(0)
    exact(index, fleet[0], PROMPT)
    need = tokens(PROMPT)
    policy.pick(fleet, need)
    assert need.prediction is None
