import torch

from omni_proxy.replica.text.constraint import ShapedTokenSampler, make_sampler
from omni_proxy.replica.text.sampling import Sampling, TokenSampler

LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0])


class Only:
    """A constraint that allows some ids, one of them at a time."""

    def __init__(self, *ids):
        self._ids = ids
        self.accepted = []

    @property
    def complete(self):
        return len(self.accepted) == 2

    def allowed(self):
        return torch.tensor([each in self._ids for each in range(4)])

    def accept(self, token):
        self.accepted.append(token)


def greedy(**more):
    return Sampling(temperature=0, **more)


def chosen(chooser, times=1):
    return [chooser.choose(LOGITS, [])[0] for _ in range(times)]


def test_a_request_without_options_gets_the_plain_sampler():
    assert type(make_sampler(Sampling(logprobs=True, top_logprobs=3), None)) is TokenSampler
    assert type(make_sampler(Sampling(presence_penalty=0.1), None)) is ShapedTokenSampler


def test_biases_are_added_and_leave_the_logits_alone():
    assert chosen(make_sampler(greedy(logit_bias={3: 3.5, 0: -0.1}), None)) == [3]
    assert chosen(make_sampler(greedy(logit_bias={0: -100, 1: -100}), None)) == [2]
    assert LOGITS.tolist() == [3.0, 2.0, 1.0, 0.0]


def test_a_bias_changes_the_log_probability_that_is_reported():
    chooser = make_sampler(greedy(logit_bias={3: 100}, logprobs=True, top_logprobs=2), None)
    token, logprob = chooser.choose(LOGITS, [])
    assert (token, round(logprob, 6)) == (3, 0)
    assert [each for _, each in chooser.likeliest] == [3, 0]


def test_presence_counts_once_and_frequency_each_time():
    assert chosen(make_sampler(greedy(presence_penalty=1.5), None), 4) == [0, 1, 0, 0]
    assert chosen(make_sampler(greedy(frequency_penalty=0.7), None), 5) == [0, 0, 1, 0, 1]


def test_tokens_of_the_prompt_are_not_counted():
    chooser = make_sampler(greedy(presence_penalty=2), None)
    assert chooser.choose(LOGITS, [0, 0, 0])[0] == 0


def test_a_constraint_is_applied_last_and_gets_each_choice():
    only = Only(1, 3)
    chooser = make_sampler(greedy(json_schema="{}", logit_bias={0: 100, 1: -100}), only)
    assert not chooser.complete
    assert chosen(chooser, 2) == [3, 3]
    assert only.accepted == [3, 3]
    assert chooser.complete


def test_the_likeliest_tokens_are_those_that_are_allowed():
    sampling = greedy(json_schema="{}", logprobs=True, top_logprobs=4)
    chooser = make_sampler(sampling, Only(1, 3))
    _, logprob = chooser.choose(LOGITS, [])
    wanted = torch.tensor([2.0, 0.0]).log_softmax(-1).tolist()
    assert [each for _, each in chooser.likeliest] == [1, 3]
    assert torch.allclose(torch.tensor([logprob, chooser.likeliest[1][0]]), torch.tensor(wanted))


def test_drawing_never_leaves_the_constraint():
    for filters in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 2.0}):
        chooser = ShapedTokenSampler(Sampling(seed=1, json_schema="{}", **filters), Only(2, 3))
        assert set(chosen(chooser, 40)) <= {2, 3}
