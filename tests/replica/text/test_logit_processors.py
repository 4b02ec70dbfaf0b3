import torch

from omni_proxy.replica.text.logit_processors import ShapedTokenSampler, make_sampler
from omni_proxy.replica.text.sampling import Sampling, TokenSampler

LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0])


class AllowOnly:
    """A constraint that allows some token ids, and is complete after two tokens."""

    def __init__(self, *token_ids):
        self._ids = token_ids
        self.accepted = []

    @property
    def complete(self):
        return len(self.accepted) == 2

    def allowed(self):
        return torch.tensor([token in self._ids for token in range(4)])

    def accept(self, token):
        self.accepted.append(token)


def greedy(**more):
    return Sampling(temperature=0, **more)


def choices(sampler, count=1):
    return [sampler.choose(LOGITS, [])[0] for _ in range(count)]


def test_a_request_without_options_gets_the_plain_sampler():
    assert type(make_sampler(Sampling(logprobs=True, top_logprobs=3), None)) is TokenSampler
    assert type(make_sampler(Sampling(presence_penalty=0.1), None)) is ShapedTokenSampler


def test_biases_are_added_without_a_change_of_the_logits():
    assert choices(make_sampler(greedy(logit_bias={3: 3.5, 0: -0.1}), None)) == [3]
    assert choices(make_sampler(greedy(logit_bias={0: -100, 1: -100}), None)) == [2]
    assert LOGITS.tolist() == [3.0, 2.0, 1.0, 0.0]


def test_a_bias_changes_the_reported_log_probability():
    sampler = make_sampler(greedy(logit_bias={3: 100}, logprobs=True, top_logprobs=2), None)
    token, logprob = sampler.choose(LOGITS, [])
    assert (token, round(logprob, 6)) == (3, 0)
    assert [token for _, token in sampler.likeliest] == [3, 0]


def test_a_presence_penalty_applies_once_and_a_frequency_penalty_each_time():
    assert choices(make_sampler(greedy(presence_penalty=1.5), None), 4) == [0, 1, 0, 0]
    assert choices(make_sampler(greedy(frequency_penalty=0.7), None), 5) == [0, 0, 1, 0, 1]


def test_penalties_do_not_count_tokens_of_the_prompt():
    sampler = make_sampler(greedy(presence_penalty=2), None)
    assert sampler.choose(LOGITS, [0, 0, 0])[0] == 0


def test_a_constraint_is_applied_last_and_accepts_each_choice():
    constraint = AllowOnly(1, 3)
    sampler = make_sampler(greedy(json_schema="{}", logit_bias={0: 100, 1: -100}), constraint)
    assert not sampler.complete
    assert choices(sampler, 2) == [3, 3]
    assert constraint.accepted == [3, 3]
    assert sampler.complete


def test_the_most_likely_tokens_are_among_the_allowed_ones():
    sampling = greedy(json_schema="{}", logprobs=True, top_logprobs=4)
    sampler = make_sampler(sampling, AllowOnly(1, 3))
    _, logprob = sampler.choose(LOGITS, [])
    expected = torch.tensor([2.0, 0.0]).log_softmax(-1).tolist()
    assert [token for _, token in sampler.likeliest] == [1, 3]
    assert torch.allclose(torch.tensor([logprob, sampler.likeliest[1][0]]), torch.tensor(expected))


def test_sampling_never_violates_the_constraint():
    for filters in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 2.0}):
        sampler = ShapedTokenSampler(Sampling(seed=1, json_schema="{}", **filters), AllowOnly(2, 3))
        assert set(choices(sampler, 40)) <= {2, 3}
