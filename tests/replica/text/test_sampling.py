import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from omni_proxy.replica.text.sampling import (
    TOP_CANDIDATES,
    Sampling,
    SamplingError,
    ShapedTokenSampler,
    TokenSampler,
    kept_tokens,
    make_sampler,
    parse_sampling,
    penalised,
)

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


def random_logits(seed, size, spread):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def naive_kept_tokens(logits, sampling):
    shares = logits.double().softmax(-1).tolist()
    order = sorted(range(len(shares)), key=lambda token: -shares[token])
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    total, kept, cumulative = sum(shares[token] for token in order), [], 0.0
    for token in order:
        # Because of rounding, the sum may reach 1 before the last token is added.
        if cumulative < sampling.top_p or sampling.top_p == 1 or not kept:
            kept.append(token)
        cumulative += shares[token] / total
    return sorted(token for token in kept if shares[token] >= sampling.min_p * shares[order[0]])


@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1, 5, 60, TOP_CANDIDATES, 3 * TOP_CANDIDATES]),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    top_k=st.sampled_from([-1, 1, 3, 50, 600, 10_000]),
    top_p=st.sampled_from([0.01, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4, 1.0]),
)
def test_the_filters_keep_the_tokens_that_naive_ones_keep(seed, size, spread, top_k, top_p, min_p):
    logits = random_logits(seed, size, spread)
    # Of two equally likely tokens either may be removed first.
    assume(len(set(logits.tolist())) == size)
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = kept_tokens(logits, sampling)
    kept_ids = list(range(size)) if kept is None else kept.tolist()
    assert kept_ids == naive_kept_tokens(logits, sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1),
        Sampling(seed=2, temperature=0.5),
        Sampling(seed=3, temperature=2.0, top_k=4),
        Sampling(seed=4, top_p=0.7),
        Sampling(seed=5, min_p=0.3, temperature=1.5),
    ],
)
def test_tokens_are_sampled_by_their_probabilities(sampling):
    logits, draws = random_logits(7, 9, 1.5), 6000
    sampler = TokenSampler(sampling)
    counts = Counter(sampler.choose(logits, [])[0] for _ in range(draws))
    scaled = logits / sampling.temperature
    kept = naive_kept_tokens(scaled, sampling)
    assert counts.keys() <= set(kept)
    shares = scaled[kept].double().softmax(-1)
    for token, share in zip(kept, shares.tolist(), strict=True):
        # Five standard deviations of a binomial; the seeds are fixed.
        assert abs(counts[token] / draws - share) < 5 * math.sqrt(share * (1 - share) / draws)


def test_one_seed_samples_the_same_tokens_and_another_does_not():
    logits = random_logits(1, 500, 1.0)

    def sample(seed):
        sampler = TokenSampler(Sampling(seed=seed))
        return [sampler.choose(logits, [])[0] for _ in range(30)]

    assert sample(11) == sample(11)
    assert sample(11) != sample(12)
    assert sample(None) != sample(None)


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=1e-9), Sampling(top_k=1)]
)
def test_temperature_zero_or_one_candidate_selects_the_most_likely_token(sampling):
    logits = random_logits(3, 700, 1.0)
    assert TokenSampler(sampling).choose(logits, [])[0] == int(logits.argmax())


def test_a_temperature_near_zero_does_not_overflow():
    logits = torch.tensor([1.0, 30.0, 29.0])
    assert TokenSampler(Sampling(temperature=2e-5, seed=1)).choose(logits, [])[0] == 1


def test_a_repetition_penalty_lowers_positive_and_negative_logits():
    logits = torch.tensor([2.0, -2.0, 0.5, 1.0])
    assert penalised(logits, [0, 1, 1], 2.0).tolist() == [1.0, -4.0, 0.5, 1.0]
    assert logits.tolist() == [2.0, -2.0, 0.5, 1.0]
    choice, _ = TokenSampler(Sampling(temperature=0, repetition_penalty=4.0)).choose(logits, [0])
    assert choice == 3


def test_the_log_probability_is_computed_before_the_filters():
    logits = random_logits(5, 50, 1.0)
    sampling = Sampling(temperature=0.5, top_k=2, seed=3, logprobs=True)
    token, logprob = TokenSampler(sampling).choose(logits, [])
    assert logprob == pytest.approx(float((logits / 0.5).log_softmax(-1)[token]), abs=1e-5)
    token, logprob = TokenSampler(Sampling(temperature=0, logprobs=True)).choose(logits, [])
    assert logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-5)
    assert TokenSampler(Sampling()).choose(logits, [])[1] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", True), ("temperature", "1"),
        ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_p", 0), ("top_p", 1.01), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1),
        ("min_p", 1.1), ("repetition_penalty", 0), ("seed", 2**63), ("seed", "x"),
        ("seed", True), ("max_new_tokens", 0), ("stop", 5), ("stop", [""]), ("stop", ""),
        ("stop", [3]), ("stop_token_ids", [-1]), ("stop_token_ids", 3), ("logprobs", 1),
        ("ignore_eos", "yes"), ("top_k", float("inf")),
    ],
)  # fmt: skip
def test_an_invalid_parameter_is_refused_by_name(field, value):
    with pytest.raises(SamplingError, match=field):
        parse_sampling({field: value}, "decode")


def test_unset_and_foreign_params_are_ignored():
    assert (
        parse_sampling({"temperature": None, "stream": True, "extra_params": {}}, "a") == Sampling()
    )


def test_params_are_parsed():
    params = {"temperature": 0, "top_k": 4.0, "stop": "end", "stop_token_ids": (3, 3), "seed": -5}
    assert parse_sampling(params, "decode") == Sampling(
        temperature=0.0, top_k=4, stop=("end",), stop_token_ids=frozenset({3}), seed=-5
    )


def test_a_stages_own_sampling_overrides_the_common_one():
    params = {"temperature": 1.5, "top_p": 0.5, "stage_sampling": {"decode": {"temperature": 0.2}}}
    assert parse_sampling(params, "decode") == Sampling(temperature=0.2, top_p=0.5)
    assert parse_sampling(params, "talk") == Sampling(temperature=1.5, top_p=0.5)


def test_a_stages_own_sampling_must_be_an_object_with_known_fields():
    with pytest.raises(SamplingError, match=r"stage_sampling\.decode has no field 'heat'"):
        parse_sampling({"stage_sampling": {"decode": {"heat": 1}}}, "decode")
    with pytest.raises(SamplingError, match="must be an object"):
        parse_sampling({"stage_sampling": {"decode": [1]}}, "decode")


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_an_integer_too_large_for_a_float_is_refused(name):
    with pytest.raises(SamplingError, match=f"{name} must be a number"):
        parse_sampling({"stage_sampling": {"decode": {name: 10**400}}}, "decode")


def test_too_many_stop_strings_are_refused():
    with pytest.raises(SamplingError, match="stop holds 257 strings; at most 256"):
        parse_sampling({"stop": [f"zz{number}" for number in range(257)]}, "decode")


def test_a_token_limit_larger_than_every_context_is_accepted():
    assert parse_sampling({"max_new_tokens": 2**40}, "decode").max_new_tokens == 2**40


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
