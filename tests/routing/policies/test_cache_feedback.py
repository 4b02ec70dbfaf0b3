"""What cache_aware learns from responses, and what it must not treat as an eviction."""

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

HALF = 4095  # bytes; with one byte for the role, whole blocks of the tree
SHARED, TOKENS = "s" * HALF, 2000  # a prefix, and the tokens of a prompt that is twice as long
FIRST, SECOND = SHARED + "a" * HALF, SHARED + "b" * HALF


def send(policy, worker, request):
    policy.pick([worker], request)
    return request.prediction


def learn(prediction, cached, prompt, sent=0):
    """As the data plane at the end of a response."""
    return prediction.learner.learn(prediction, cached, prompt, sent)


def respond(policy, worker, request, cached, prompt=TOKENS):
    """Sends the request, and learns from its response."""
    prediction = send(policy, worker, request)
    note_first_byte(prediction)
    return learn(prediction, cached, prompt)


def held(policy, worker, text):
    return policy.explain_pick([worker], chat(text))["matched_bytes"][worker.url]


def policy_with_cache(**rules):
    """A policy whose only worker has reported a hit, so that it is known to have a cache."""
    policy, (worker,) = cache_aware(**rules), workers(0)
    respond(policy, worker, chat("known"), 1, 1)
    return policy, worker


def test_evicted_text_is_forgotten_with_its_branches_but_not_the_prompt():
    policy, worker = policy_with_cache()
    respond(policy, worker, chat(FIRST), 0)
    assert respond(policy, worker, chat(SECOND), 0) == 1000  # the shared half was predicted
    assert held(policy, worker, SECOND) == 2 * HALF
    assert held(policy, worker, FIRST) == HALF  # the part shared with the prompt just sent
    assert policy.stats()["corrections"] == 1


def test_a_branch_above_the_reported_length_is_kept():
    policy, worker = policy_with_cache()
    respond(policy, worker, chat("s" * 400 + "x" * 7600), 0)
    respond(policy, worker, chat(FIRST), 0)
    respond(policy, worker, chat(SECOND), 200)  # 800 bytes; the next 512 are tolerance
    assert held(policy, worker, "s" * 400 + "x" * 7600) == 8000
    assert held(policy, worker, FIRST) == HALF


@pytest.mark.parametrize("cached", [1000, 1000 - BLOCK_TOKENS, 700])
def test_a_small_difference_is_no_eviction(cached):
    policy, worker = policy_with_cache()
    respond(policy, worker, chat(FIRST), 0)
    respond(policy, worker, chat(SECOND), cached)
    assert held(policy, worker, FIRST) == 2 * HALF
    assert not policy.stats()["corrections"]


@pytest.mark.parametrize(("in_flight", "chosen"), [(1, 0), (5, 1)])
def test_a_small_tree_after_evictions_attracts_no_more_than_a_share(in_flight, chosen):
    policy, fleet = cache_aware(warmup_share=0.0), workers(0, 0)
    for worker in fleet:
        respond(policy, worker, chat("known"), 1, 1)
        for end in "abcdef":
            respond(policy, worker, chat(SHARED + end * 20_000), 4000)
    respond(policy, fleet[0], chat(SHARED), 0)
    sizes = policy.stats()["tree_size_by_worker"]
    assert sizes[fleet[0].url] * 2 < sizes[fleet[1].url]
    fleet[0].in_flight = in_flight
    assert policy.preview_pick(fleet, chat("another"))[0] is fleet[chosen]


def test_only_the_tree_of_the_worker_that_responded_is_corrected():
    policy, (first_worker, second_worker) = cache_aware(), workers(0, 0)
    for worker in (first_worker, second_worker):
        respond(policy, worker, chat("known"), 1, 1)
        respond(policy, worker, chat(FIRST), 0)
    respond(policy, first_worker, chat(SECOND), 0)
    assert (held(policy, first_worker, FIRST), held(policy, second_worker, FIRST)) == (
        HALF,
        2 * HALF,
    )


def test_a_prompt_in_flight_was_not_evicted():
    policy, worker = policy_with_cache()
    waiting = send(policy, worker, chat(FIRST))
    assert respond(policy, worker, chat(SECOND), 0) == 1000
    assert held(policy, worker, FIRST) == 2 * HALF
    note_first_byte(waiting)
    respond(policy, worker, chat(SHARED + "c" * HALF), 0)
    assert held(policy, worker, FIRST) == HALF


def test_a_prompt_sent_later_was_not_evicted():
    policy, worker = policy_with_cache()
    respond(policy, worker, chat(SHARED), 0)
    first = send(policy, worker, chat(SECOND))
    send(policy, worker, chat(FIRST))
    learn(first, 0, TOKENS)
    assert held(policy, worker, FIRST) == 2 * HALF


def test_a_worker_that_always_reports_0_is_not_corrected_any_longer():
    policy, (worker,) = cache_aware(), workers(0)
    for number in range(MISSES + 2):
        respond(policy, worker, chat(SHARED + f"{number:02}" * 2000), 0)
    assert policy.stats()["corrections"] == MISSES - 1
    last, before = (SHARED + f"{MISSES + more:02}" * 2000 for more in (1, 0))
    assert held(policy, worker, last) == held(policy, worker, before) == HALF + 4000
    respond(policy, worker, chat(SHARED), 500)  # it has a cache after all
    respond(policy, worker, chat(SHARED + "c" * HALF), 0)
    assert held(policy, worker, last) == HALF


@pytest.mark.parametrize(
    "request_",
    [
        Requirements(IMAGE, decoded=chat(SECOND).body_fields),
        Requirements(0, decoded=body_fields_of({"prompt": [FIRST, SECOND]})),
        Requirements(0, decoded=body_fields_of({"input_ids": [[1, 2], [3, 4]]})),
    ],
)
def test_media_and_several_prompts_are_not_compared(request_):
    policy, worker = policy_with_cache()
    assert respond(policy, worker, request_, 0) is None
    assert respond(policy, worker, request_, 0) is None
    assert not policy.stats()["corrections"]


def test_token_ids_and_long_texts_are_compared():
    policy, worker = policy_with_cache()
    for prompt in ([1234] * 2000, [[1234] * 2000]):
        need = Requirements(0, decoded=body_fields_of({"prompt": prompt}))
        compared = respond(policy, worker, need, 0) is not None
        assert compared is (prompt[0] == 1234)
    text = "t" * (2 * LIMIT)
    respond(policy, worker, chat(text), 0)
    prediction = send(policy, worker, chat(text))
    # All of the compared text is cached: half of the prompt, according to the request's length.
    assert learn(prediction, 0, 1000, 2 * LIMIT) == 499


def test_without_feedback_nothing_is_predicted_and_a_reload_switches_it():
    policy, (worker,) = cache_aware(feedback=False), workers(0)
    request = chat(FIRST)
    policy.pick([worker], request)
    assert request.prediction is None
    assert policy.reconfigure(RoutingConfig(policy="cache_aware"))
    assert send(policy, worker, chat(FIRST)) is not None
    off = RoutingConfig(policy="cache_aware", cache_aware=CacheAwareConfig(feedback=False))
    assert (learns_from_answers(RoutingConfig(policy="cache_aware")), learns_from_answers(off)) == (
        True, False,
    )  # fmt: skip
    assert not learns_from_answers(RoutingConfig())


def test_a_retry_counts_as_in_flight_only_at_its_new_worker():
    policy, (first_worker, second_worker) = cache_aware(), workers(0, 0)
    request = chat(FIRST)
    first = send(policy, first_worker, request)
    second = send(policy, second_worker, request)
    assert first.answered
    assert not second.answered
    assert second.former is None


def agreeing(answers=AGREED):
    """A policy whose worker has responded this number of times as predicted."""
    policy, (worker,) = cache_aware(), workers(0)
    for _ in range(answers):
        respond(policy, worker, chat(FIRST), TOKENS)
    return policy, worker


def test_of_a_worker_that_responds_as_predicted_few_responses_are_compared():
    policy, worker = agreeing()
    followed = [send(policy, worker, chat(FIRST)) is not None for _ in range(2 * AGREED_SHARE)]
    assert followed == ([False] * (AGREED_SHARE - 1) + [True]) * 2


def test_prompts_without_a_prediction_are_still_stored():
    policy, worker = agreeing()
    assert send(policy, worker, chat(SECOND)) is None
    assert held(policy, worker, SECOND) == 2 * HALF


def test_a_prompt_in_flight_without_a_prediction_was_not_evicted():
    policy, worker = agreeing()
    in_flight_text = SHARED + "d" * HALF
    assert send(policy, worker, chat(in_flight_text)) is None
    while (differs := send(policy, worker, chat(SECOND))) is None:
        pass
    learn(differs, 0, TOKENS)
    respond(policy, worker, chat(SECOND), 0)
    assert held(policy, worker, in_flight_text) == 2 * HALF


def test_after_a_difference_all_responses_are_compared_again():
    policy, worker = agreeing()
    while (differs := send(policy, worker, chat(SECOND))) is None:
        pass
    learn(differs, 0, TOKENS)  # older prompts may be in flight
    assert respond(policy, worker, chat(SECOND), 0) == TOKENS  # and no later one has a response
    assert held(policy, worker, FIRST) == 2 * HALF
    assert not policy.stats()["corrections"]
    assert respond(policy, worker, chat(SHARED + "c" * HALF), 0) == TOKENS // 2
    assert held(policy, worker, FIRST) == HALF
    assert policy.stats()["corrections"] == 1


def test_a_worker_that_reports_nothing_is_compared_rarely_until_it_reports():
    policy, worker = policy_with_cache()
    for _ in range(SILENT + 1):
        send(policy, worker, chat(FIRST)).reports.note_silence()
    followed = [send(policy, worker, chat(FIRST)) for _ in range(SILENT)]
    assert [prediction is not None for prediction in followed] == [False] * (SILENT - 1) + [True]
    learn(followed[-1], TOKENS, TOKENS)
    assert all(send(policy, worker, chat(FIRST)) for _ in range(3))


def test_the_cost_model_compares_every_response():
    policy, (worker,) = cache_aware(score="cost"), workers(0)
    for _ in range(AGREED + 2):
        assert respond(policy, worker, chat(FIRST), TOKENS) is not None


def test_a_retry_without_a_prediction_ends_that_of_the_earlier_attempt():
    policy, (first_worker, second_worker) = cache_aware(), workers(0, 0)
    for _ in range(AGREED):
        respond(policy, second_worker, chat(FIRST), TOKENS)
    request = chat(FIRST)
    first = send(policy, first_worker, request)
    assert send(policy, second_worker, request) is None
    assert first.answered


def test_an_explanation_shows_the_reports_of_responses():
    policy, worker = policy_with_cache()
    respond(policy, worker, chat(FIRST), 0)
    respond(policy, worker, chat(FIRST), 1500)
    shown = policy.explain_pick([worker], chat(FIRST))["cache_reports"]
    assert shown == {
        worker.url: {"answers": 3, "predicted_tokens": TOKENS, "reported_tokens": 1501}
    }


class AgainstAnEngine(RuleBasedStateMachine):
    """Compares the tree with an engine whose cache evicts the least recently used blocks: the tree
    keeps all that the engine has cached or is about to compute, whatever it reports."""

    BLOCK, BYTES = BLOCK_TOKENS, 4

    @initialize(blocks=st.integers(8, 40))
    def begin(self, blocks):
        self.policy, self.worker = policy_with_cache()
        self.capacity = blocks
        self.cache = OrderedDict()  # cached prefixes, the least recently used first
        self.waiting, self.computed = [], []

    def next_waiting(self, data):
        return data.draw(st.integers(0, len(self.waiting) - 1))

    @rule(path=st.lists(st.sampled_from("ab"), min_size=3, max_size=7))
    def send(self, path):
        text = "".join(letter * self.BLOCK * self.BYTES for letter in path)
        request = chat(text)
        self.policy.pick([self.worker], request)
        self.waiting.append((path, request.prediction))

    @rule(data=st.data(), responds=st.booleans())
    def compute(self, data, responds):
        """The engine begins a request, and ends it now or later."""
        if not self.waiting:
            return
        path, prediction = self.waiting.pop(self.next_waiting(data))
        names = ["".join(path[:end]) for end in range(1, len(path) + 1)]
        hits = next((at for at, name in enumerate(names) if name not in self.cache), len(names))
        for name in reversed(names):
            self.cache[name] = None
            self.cache.move_to_end(name)
        while len(self.cache) > self.capacity:
            self.cache.popitem(last=False)
        note_first_byte(prediction)
        self.computed.append((prediction, hits, len(path)))
        if responds:
            self.respond(data)

    @rule(data=st.data())
    def respond(self, data):
        if not self.computed:
            return
        place = data.draw(st.integers(0, len(self.computed) - 1))
        prediction, hits, blocks = self.computed.pop(place)
        tokens = blocks * self.BLOCK
        if prediction is not None:
            learn(prediction, min(hits * self.BLOCK, tokens - 1), tokens)

    @rule()
    def flush(self):
        self.cache.clear()

    @rule()
    def maintain(self):
        self.policy.maintain(0.0)

    @invariant()
    def cached_and_waiting_prompts_are_held(self):
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
    """An engine that begins prompts in order, and of which few responses are compared."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(cache_prediction, "AGREED", 2)
        self.patch.setattr(cache_prediction, "AGREED_SHARE", 3)

    def teardown(self):
        self.patch.undo()

    def next_waiting(self, data):
        return 0


TestAgainstAnEngineInOrder = AgainstAnEngineInOrder.TestCase
TestAgainstAnEngineInOrder.settings = settings(max_examples=examples(150), stateful_step_count=30)
