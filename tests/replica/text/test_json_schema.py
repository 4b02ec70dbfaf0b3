import json
import random

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.replica.text import constraint
from omni_proxy.replica.text.json_schema import (
    ANY_OBJECT,
    MAX_COMPILED,
    MAX_SCHEMA_BYTES,
    ConstraintError,
    ConstraintFactory,
    MissingLibraryError,
    ShapedTokenSampler,
    check_schema,
    make_sampler,
)
from omni_proxy.replica.text.sampling import Sampling, TokenSampler
from tests.example_counts import examples
from tests.replica.text.scheduler_harness import tiny

pytest.importorskip("llguidance")

WORDS = st.text("abc", min_size=1, max_size=4)
LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0])
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 12)),
    st.builds(lambda n: {"type": "integer", "minimum": 0, "maximum": n}, st.integers(0, 999)),
    st.builds(lambda words: {"enum": words}, st.lists(WORDS, min_size=1, max_size=3, unique=True)),
)


def objects(inner):
    return st.dictionaries(WORDS, inner, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties),
            "additionalProperties": False,
        }
    )


def arrays(inner):
    return st.builds(
        lambda items, max_items: {"type": "array", "items": items, "maxItems": max_items},
        inner,
        st.integers(0, 3),
    )


SCHEMAS = st.recursive(LEAVES, lambda inner: objects(inner) | arrays(inner), max_leaves=6)


def constraint_for(schema, tokenizer=None):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return ConstraintFactory(tokenizer or tiny().tokenizer).constraint(text)


def token_ids(allowed):
    return allowed.nonzero().flatten().tolist()


def sample_text(constraint, rng, max_tokens=400):
    """A text of tokens that are sampled from the allowed ones."""
    data = b""
    for _ in range(max_tokens):
        if constraint.complete:
            break
        token = rng.choice(token_ids(constraint.allowed()))
        constraint.accept(token)
        data += tiny().tokenizer.token_bytes(token)
    return data.decode(errors="replace")


@settings(max_examples=examples(60))
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_any_sampled_text_fits_the_schema(schema, seed):
    compiled = constraint_for(schema)
    text = sample_text(compiled, random.Random(seed))
    assert compiled.complete, text
    assert jsonschema_rs.validator_for(schema).is_valid(json.loads(text)), text


def test_constraints_of_one_schema_have_separate_states():
    constraints = ConstraintFactory(tiny().tokenizer)
    schema = json.dumps({"enum": ["ab", "cd"]})
    first, second = constraints.constraint(schema), constraints.constraint(schema)
    for letter in '"a':
        first.accept(tiny().tokenizer.encode(letter)[0])
    assert token_ids(second.allowed()) == token_ids(constraint_for(schema).allowed())
    for letter in '"cd"':
        second.accept(tiny().tokenizer.encode(letter)[0])
    assert (first.complete, second.complete) == (False, True)


def test_only_the_latest_compiled_schemas_are_cached():
    constraints = ConstraintFactory(tiny().tokenizer)
    for number in range(MAX_COMPILED + 3):
        constraints.constraint(json.dumps({"const": number}))
    assert len(constraints._compiled) == MAX_COMPILED
    assert json.dumps({"const": 2}) not in constraints._compiled
    assert json.dumps({"const": 3}) in constraints._compiled


def test_end_tokens_are_allowed_only_where_the_text_could_end():
    compiled = constraint_for({"type": "integer"})
    end_tokens = tiny().tokenizer.eos_ids
    assert not end_tokens & set(token_ids(compiled.allowed()))
    (seven,) = tiny().tokenizer.encode("7")
    compiled.accept(seven)
    assert end_tokens <= set(token_ids(compiled.allowed()))
    assert not compiled.complete


def test_control_tokens_are_not_allowed_within_a_string():
    compiled = constraint_for({"type": "string"})
    compiled.accept(tiny().tokenizer.encode('"')[0])
    names = {
        token for token in token_ids(compiled.allowed()) if tiny().tokenizer.control_name(token)
    }
    assert names == set()


def test_whitespace_between_two_parts_is_limited():
    compiled = constraint_for(ANY_OBJECT)
    for letter in "{\n   ":
        compiled.accept(tiny().tokenizer.encode(letter)[0])
    assert tiny().tokenizer.encode("\n")[0] not in token_ids(compiled.allowed())
    for _ in range(9):
        compiled.accept(tiny().tokenizer.encode(" ")[0])
    assert tiny().tokenizer.encode(" ")[0] not in token_ids(compiled.allowed())


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "#/$defs/Nobody"}, "/$defs/Nobody"),
        ({"$ref": "http://127.0.0.1:9/x"}, "http://127.0.0.1:9/x"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable"),
        ({"enum": ["x" * MAX_SCHEMA_BYTES]}, f"the limit is {MAX_SCHEMA_BYTES}"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_reason(schema, reason):
    for check in (check_schema, ConstraintFactory(tiny().tokenizer).constraint):
        with pytest.raises(ConstraintError) as refused:
            check(json.dumps(schema))
        assert reason in str(refused.value)


def test_a_too_deeply_nested_schema_is_refused():
    deep = '{"items":' * 500 + "{}" + "}" * 500
    with pytest.raises(ConstraintError, match="recursion"):
        check_schema(deep)


def test_a_too_complex_schema_is_an_error():
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2500)}}
    with pytest.raises(ConstraintError, match="cannot be enforced"):
        sample_text(constraint_for(wide), random.Random(0))


def test_without_the_library_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingLibraryError, match=r"omni-proxy\[replica\]"):
        constraint.check_schema(ANY_OBJECT)


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
