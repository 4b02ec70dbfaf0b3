"""Texts that an engine has tokenized are matched by blocks, others in the tree."""

import pytest

from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.kv_events.tokenized_texts import MIN_BYTES
from tests.routing.policies.chats import chat, workers
from tests.routing.policies.test_event_aware import EVENTS, SIZE, exact, policy_of

TOKENIZE = EVENTS + 'tokenize = "engine"\n'
TEXT = "t" * 8191  # and a byte for the role


@pytest.fixture
def index():
    return BlockIndex()


def answer_question(index, tokens):
    request = index.texts.next_request()
    index.texts.add(request, tokens)
    return request


def test_the_worker_of_a_long_text_is_asked_to_tokenize_it(index):
    policy, fleet = policy_of(index, TOKENIZE), workers(0, 0)
    for worker in fleet:
        exact(index, worker)
    first = policy.pick(fleet, chat(TEXT))
    assert answer_question(index, range(2048)).url == first.url
    (other,) = {*fleet} - {first}
    # Events: the first worker has no such block, the other one has computed them.
    exact(index, other, list(range(2048)), size=SIZE)
    worker, reason = policy.preview_pick(fleet, chat(TEXT + "u" * 500))
    assert (worker, index.texts.used) == (other, 0)
    assert reason.startswith("2048 of 2173 tokens are cached")
    assert policy.pick(fleet, chat(TEXT + "u" * 500)) is other
    assert policy.stats()["tokenize"] == {"texts": 1, "calls": 1, "failed": 0, "used": 1}
    assert index.texts.next_request() is None  # the text is mostly known


def test_a_text_whose_blocks_no_worker_has_is_matched_in_the_tree(index):
    policy, fleet = policy_of(index, TOKENIZE), workers(0, 0)
    for worker in fleet:
        exact(index, worker, [9] * 8)
    first = policy.pick(fleet, chat(TEXT))
    answer_question(index, range(2048))
    policy.maintain(10.0)
    assert "bytes match" in policy.preview_pick(fleet, chat(TEXT))[1]
    assert policy.pick(fleet, chat(TEXT)) is first
    assert index.texts.used == 0


def test_the_tree_decides_if_it_has_more_of_the_text(index):
    policy, fleet = policy_of(index, TOKENIZE), workers(0, 0)
    for worker in fleet:
        exact(index, worker)
    policy.record_pick(fleet[0], chat(TEXT + "u" * 9000))
    policy.pick(fleet[1:], chat(TEXT))
    answer_question(index, range(2048))
    exact(index, fleet[1], list(range(2048)))
    assert policy.preview_pick(fleet, chat(TEXT + "u" * 9000))[0] is fleet[0]


@pytest.mark.parametrize(
    ("config", "text", "trusted"),
    [(EVENTS, TEXT, True), (TOKENIZE, "t" * (MIN_BYTES - 2), True), (TOKENIZE, TEXT, False)],
    ids=["off", "short", "not exact"],
)
def test_no_worker_is_asked_to_tokenize(index, config, text, trusted):
    policy, fleet = policy_of(index, config), workers(0)
    if trusted:
        exact(index, fleet[0])
    policy.pick(fleet, chat(text))
    assert index.texts.next_request() is None
    policy.preview_pick(fleet, chat(TEXT))
    assert index.texts.next_request() is None
