"""What cache_aware learns from answers, and what it must not take for an eviction."""

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omni_proxy.config.schema import CacheAwareConfig, RoutingConfig
from omni_proxy.routing import cache_prediction
from omni_proxy.routing.cache_prediction import AGREED, AGREED_SHARE, SILENT, note_first_byte
from omni_proxy.routing.inspect.body_fields import body_fields_of
from omni_proxy.routing.inspect.prefix_text import LIMIT
from omni_proxy.routing.inspect.requirements import IMAGE, Requirements
from omni_proxy.routing.policies.cache_feedback import BLOCK_TOKENS, MISSES, learns_from_answers
from tests.example_counts import examples
from tests.routing.policies.chats import cache_aware, chat, workers

HALF = 4095  # bytes, and one for the role: whole blocks of the tree
SHARED, TOKENS = "s" * HALF, 2000  # a prefix, and the tokens of a prompt that is twice as long
FIRST, SECOND = SHARED + "a" * HALF, SHARED + "b" * HALF


def sent(policy, worker, request):
    policy.pick([worker], request)
    return request.prediction


def answered(policy, worker, request, cached, prompt=TOKENS):
    """The request is sent and answered."""
    prediction = sent(policy, worker, request)
    note_first_byte(prediction)
    return policy._feedback.learn(prediction, cached, prompt, 0)


def held(policy, worker, text):
    return policy.explain_pick([worker], chat(text))["matched_bytes"][worker.url]


def reusing(**rules):
    """A policy whose one worker has reported a hit, so that it is known to have a cache."""
    policy, (worker,) = cache_aware(**rules), workers(0)
    answered(policy, worker, chat("known"), 1, 1)
    return policy, worker


def test_what_was_evicted_is_forgotten_with_the_branches_and_the_prompt_stays():
    policy, worker = reusing()
    answered(policy, worker, chat(FIRST), 0)
    assert answered(policy, worker, chat(SECOND), 0) == 1000  # the shared half was predicted
    assert held(policy, worker, SECOND) == 2 * HALF
    assert held(policy, worker, FIRST) == HALF  # what it shares with the prompt just sent
    assert policy.stats()["corrections"] == 1


def test_a_branch_above_the_reported_length_stays():
    policy, worker = reusing()
    answered(policy, worker, chat("s" * 400 + "x" * 7600), 0)
    answered(policy, worker, chat(FIRST), 0)
    answered(policy, worker, chat(SECOND), 200)  # 800 bytes, and 512 more are not judged
    assert held(policy, worker, "s" * 400 + "x" * 7600) == 8000
    assert held(policy, worker, FIRST) == HALF


@pytest.mark.parametrize("cached", [1000, 1000 - BLOCK_TOKENS, 700])
def test_blocks_and_the_density_of_text_are_no_eviction(cached):
    policy, worker = reusing()
    answered(policy, worker, chat(FIRST), 0)
    answered(policy, worker, chat(SECOND), cached)
    assert held(policy, worker, FIRST) == 2 * HALF
    assert not policy.stats()["corrections"]


@pytest.mark.parametrize(("in_flight", "chosen"), [(1, 0), (5, 1)])
def test_a_worker_that_evicts_gets_no_request_for_its_small_tree_beyond_its_share(
    in_flight, chosen
):
    policy, fleet = cache_aware(warmup_share=0.0), workers(0, 0)
    for worker in fleet:
        answered(policy, worker, chat("known"), 1, 1)
        for end in "abcdef":
            answered(policy, worker, chat(SHARED + end * 20_000), 4000)
    answered(policy, fleet[0], chat(SHARED), 0)
    sizes = policy.stats()["tree_size_by_worker"]
    assert sizes[fleet[0].url] * 2 < sizes[fleet[1].url]
    fleet[0].in_flight = in_flight
    assert policy.preview_pick(fleet, chat("another"))[0] is fleet[chosen]


def test_only_the_worker_that_answered_is_corrected():
    policy, (one, other) = cache_aware(), workers(0, 0)
    for worker in (one, other):
        answered(policy, worker, chat("known"), 1, 1)
        answered(policy, worker, chat(FIRST), 0)
    answered(policy, one, chat(SECOND), 0)
    assert (held(policy, one, FIRST), held(policy, other, FIRST)) == (HALF, 2 * HALF)


def test_a_prompt_that_was_on_its_way_is_no_eviction():
    policy, worker = reusing()
    waiting = sent(policy, worker, chat(FIRST))
    assert answered(policy, worker, chat(SECOND), 0) == 1000
    assert held(policy, worker, FIRST) == 2 * HALF
    note_first_byte(waiting)
    answered(policy, worker, chat(SHARED + "c" * HALF), 0)
    assert held(policy, worker, FIRST) == HALF


def test_a_prompt_that_came_later_is_no_eviction():
    policy, worker = reusing()
    answered(policy, worker, chat(SHARED), 0)
    first = sent(policy, worker, chat(SECOND))
    sent(policy, worker, chat(FIRST))
    policy._feedback.learn(first, 0, TOKENS, 0)
    assert held(policy, worker, FIRST) == 2 * HALF


def test_a_worker_that_always_reports_0_is_left_alone_after_some_answers():
    policy, (worker,) = cache_aware(), workers(0)
    for number in range(MISSES + 2):
        answered(policy, worker, chat(SHARED + f"{number:02}" * 2000), 0)
    assert policy.stats()["corrections"] == MISSES - 1
    last, before = (SHARED + f"{MISSES + more:02}" * 2000 for more in (1, 0))
    assert held(policy, worker, last) == held(policy, worker, before) == HALF + 4000
    answered(policy, worker, chat(SHARED), 500)  # it has a cache after all
    answered(policy, worker, chat(SHARED + "c" * HALF), 0)
    assert held(policy, worker, last) == HALF


@pytest.mark.parametrize(
    "request_",
    [
        Requirements(IMAGE, decoded=chat(SECOND).body_fields),
        Requirements(0, decoded=body_fields_of({"prompt": [FIRST, SECOND]})),
        Requirements(0, decoded=body_fields_of({"input_ids": [[1, 2], [3, 4]]})),
    ],
)
def test_media_and_several_prompts_are_not_judged(request_):
    policy, worker = reusing()
    assert answered(policy, worker, request_, 0) is None
    assert answered(policy, worker, request_, 0) is None
    assert not policy.stats()["corrections"]


def test_token_ids_and_long_texts_are_judged():
    policy, worker = reusing()
    for prompt in ([1234] * 2000, [[1234] * 2000]):
        need = Requirements(0, decoded=body_fields_of({"prompt": prompt}))
        judged = answered(policy, worker, need, 0) is not None
        assert judged is (prompt[0] == 1234)
    text = "t" * (2 * LIMIT)
    answered(policy, worker, chat(text), 0)
    prediction = sent(policy, worker, chat(text))
    # All that is compared is cached: half of the prompt, as the request's own length shows.
    assert policy._feedback.learn(prediction, 0, 1000, 2 * LIMIT) == 499


def test_without_feedback_nothing_is_noted_and_it_can_be_switched_at_any_time():
    policy, (worker,) = cache_aware(feedback=False), workers(0)
    request = chat(FIRST)
    policy.pick([worker], request)
    assert request.prediction is None
    assert policy.reconfigure(RoutingConfig(policy="cache_aware"))
    assert sent(policy, worker, chat(FIRST)) is not None
    off = RoutingConfig(policy="cache_aware", cache_aware=CacheAwareConfig(feedback=False))
    assert (learns_from_answers(RoutingConfig(policy="cache_aware")), learns_from_answers(off)) == (
        True, False,
    )  # fmt: skip
    assert not learns_from_answers(RoutingConfig())


def test_a_request_that_is_sent_again_waits_at_its_new_worker_alone():
    policy, (one, other) = cache_aware(), workers(0, 0)
    request = chat(FIRST)
    first = sent(policy, one, request)
    second = sent(policy, other, request)
    assert first.answered
    assert not second.answered
    assert second.former is None


def agreeing(answers=AGREED):
    """A policy whose worker has answered so often as was predicted."""
    policy, (worker,) = cache_aware(), workers(0)
    for _ in range(answers):
        answered(policy, worker, chat(FIRST), TOKENS)
    return policy, worker


def test_of_a_worker_that_answers_as_predicted_one_answer_in_so_many_is_compared():
    policy, worker = agreeing()
    followed = [sent(policy, worker, chat(FIRST)) is not None for _ in range(2 * AGREED_SHARE)]
    assert followed == ([False] * (AGREED_SHARE - 1) + [True]) * 2


def test_prompts_without_a_prediction_are_remembered_all_the_same():
    policy, worker = agreeing()
    assert sent(policy, worker, chat(SECOND)) is None
    assert held(policy, worker, SECOND) == 2 * HALF


def test_a_prompt_on_its_way_without_a_prediction_is_no_eviction():
    policy, worker = agreeing()
    on_its_way = SHARED + "d" * HALF
    assert sent(policy, worker, chat(on_its_way)) is None
    while (differs := sent(policy, worker, chat(SECOND))) is None:
        pass
    policy._feedback.learn(differs, 0, TOKENS, 0)
    answered(policy, worker, chat(SECOND), 0)
    assert held(policy, worker, on_its_way) == 2 * HALF


def test_after_a_difference_all_answers_are_compared_and_corrections_resume():
    policy, worker = agreeing()
    while (differs := sent(policy, worker, chat(SECOND))) is None:
        pass
    policy._feedback.learn(differs, 0, TOKENS, 0)  # older prompts may be on their way
    assert answered(policy, worker, chat(SECOND), 0) == TOKENS  # nor has a later one been answered
    assert held(policy, worker, FIRST) == 2 * HALF
    assert not policy.stats()["corrections"]
    assert answered(policy, worker, chat(SHARED + "c" * HALF), 0) == TOKENS // 2
    assert held(policy, worker, FIRST) == HALF
    assert policy.stats()["corrections"] == 1


def test_a_worker_that_reports_nothing_is_asked_now_and_then_until_it_reports():
    policy, worker = reusing()
    for _ in range(SILENT + 1):
        sent(policy, worker, chat(FIRST)).reports.note_silence()
    followed = [sent(policy, worker, chat(FIRST)) for _ in range(SILENT)]
    assert [prediction is not None for prediction in followed] == [False] * (SILENT - 1) + [True]
    policy._feedback.learn(followed[-1], TOKENS, TOKENS, 0)
    assert all(sent(policy, worker, chat(FIRST)) for _ in range(3))


def test_the_cost_model_needs_every_prompt():
    policy, (worker,) = cache_aware(score="cost"), workers(0)
    for _ in range(AGREED + 2):
        assert answered(policy, worker, chat(FIRST), TOKENS) is not None


def test_the_prediction_of_an_earlier_attempt_ends_where_the_next_worker_is_not_compared():
    policy, (one, other) = cache_aware(), workers(0, 0)
    for _ in range(AGREED):
        answered(policy, other, chat(FIRST), TOKENS)
    request = chat(FIRST)
    first = sent(policy, one, request)
    assert sent(policy, other, request) is None
    assert first.answered


def test_explain_shows_what_answers_have_reported():
    policy, worker = reusing()
    answered(policy, worker, chat(FIRST), 0)
    answered(policy, worker, chat(FIRST), 1500)
    shown = policy.explain_pick([worker], chat(FIRST))["cache_reports"]
    assert shown == {
        worker.url: {"answers": 3, "predicted_tokens": TOKENS, "reported_tokens": 1501}
    }


class AgainstAnEngine(RuleBasedStateMachine):
    """An engine with a cache of blocks that forgets the longest unused, beside the tree: whatever
    it reports, all that it has or is about to compute stays in the tree."""

    BLOCK, BYTES = BLOCK_TOKENS, 4

    @initialize(blocks=st.integers(8, 40))
    def begin(self, blocks):
        self.policy, self.worker = reusing()
        self.room = blocks
        self.cache = OrderedDict()  # prefixes that are cached, the longest unused first
        self.waiting, self.computed = [], []

    def next_one(self, data):
        return data.draw(st.integers(0, len(self.waiting) - 1))

    @rule(path=st.lists(st.sampled_from("ab"), min_size=3, max_size=7))
    def ask(self, path):
        text = "".join(letter * self.BLOCK * self.BYTES for letter in path)
        request = chat(text)
        self.policy.pick([self.worker], request)
        self.waiting.append((path, request.prediction))

    @rule(data=st.data(), answers=st.booleans())
    def compute(self, data, answers):
        """The engine begins with a request, and ends it then or later."""
        if not self.waiting:
            return
        path, prediction = self.waiting.pop(self.next_one(data))
        names = ["".join(path[:end]) for end in range(1, len(path) + 1)]
        found = next((at for at, name in enumerate(names) if name not in self.cache), len(names))
        for name in reversed(names):
            self.cache[name] = None
            self.cache.move_to_end(name)
        while len(self.cache) > self.room:
            self.cache.popitem(last=False)
        note_first_byte(prediction)
        self.computed.append((prediction, found, len(path)))
        if answers:
            self.answer(data)

    @rule(data=st.data())
    def answer(self, data):
        if not self.computed:
            return
        place = data.draw(st.integers(0, len(self.computed) - 1))
        prediction, found, blocks = self.computed.pop(place)
        tokens = blocks * self.BLOCK
        if prediction is not None:
            self.policy._feedback.learn(prediction, min(found * self.BLOCK, tokens - 1), tokens, 0)

    @rule()
    def flush(self):
        self.cache.clear()

    @rule()
    def maintain(self):
        self.policy.maintain(0.0)

    @invariant()
    def what_is_cached_or_on_its_way_is_held(self):
        reachable = [
            name
            for name in self.cache
            if all(name[:end] in self.cache for end in range(1, len(name)))
        ]
        for name in [*reachable, *("".join(path) for path, _ in self.waiting)]:
            text = "".join(letter * self.BLOCK * self.BYTES for letter in name)
            assert held(self.policy, self.worker, text) == len(text)


TestAgainstAnEngine = AgainstAnEngine.TestCase
TestAgainstAnEngine.settings = settings(max_examples=examples(150), stateful_step_count=20)


class AgainstAnEngineInOrder(AgainstAnEngine):
    """The same of an engine that begins prompts as they come, of which few answers are compared."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(cache_prediction, "AGREED", 2)
        self.patch.setattr(cache_prediction, "AGREED_SHARE", 3)

    def teardown(self):
        self.patch.undo()

    def next_one(self, data):
        return 0


TestAgainstAnEngineInOrder = AgainstAnEngineInOrder.TestCase
TestAgainstAnEngineInOrder.settings = settings(max_examples=examples(150), stateful_step_count=30)
