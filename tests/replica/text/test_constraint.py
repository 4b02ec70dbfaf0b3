import json
import random

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.replica.text import constraint
from omni_proxy.replica.text.constraint import (
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
    st.builds(lambda each: {"enum": each}, st.lists(WORDS, min_size=1, max_size=3, unique=True)),
)


def objects(inner):
    return st.dictionaries(WORDS, inner, max_size=3).map(
        lambda each: {
            "type": "object",
            "properties": each,
            "required": sorted(each),
            "additionalProperties": False,
        }
    )


def arrays(inner):
    return st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most},
        inner,
        st.integers(0, 3),
    )


SCHEMAS = st.recursive(LEAVES, lambda inner: objects(inner) | arrays(inner), max_leaves=6)


def constrained(schema, tokenizer=None):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return ConstraintFactory(tokenizer or tiny().tokenizer).constraint(text)


def ids(allowed):
    return allowed.nonzero().flatten().tolist()


def walked(one, chance, most=400):
    """A text of tokens sampled from all that are allowed."""
    written = b""
    for _ in range(most):
        if one.complete:
            break
        token = chance.choice(ids(one.allowed()))
        one.accept(token)
        written += tiny().tokenizer.token_bytes(token)
    return written.decode(errors="replace")


@settings(max_examples=examples(60))
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_whatever_is_drawn_fits_the_schema(schema, seed):
    one = constrained(schema)
    text = walked(one, random.Random(seed))
    assert one.complete, text
    assert jsonschema_rs.validator_for(schema).is_valid(json.loads(text)), text


def test_two_answers_to_one_schema_do_not_meet():
    constraints = ConstraintFactory(tiny().tokenizer)
    schema = json.dumps({"enum": ["ab", "cd"]})
    first, second = constraints.constraint(schema), constraints.constraint(schema)
    for letter in '"a':
        first.accept(tiny().tokenizer.encode(letter)[0])
    assert ids(second.allowed()) == ids(constrained(schema).allowed())
    for letter in '"cd"':
        second.accept(tiny().tokenizer.encode(letter)[0])
    assert (first.complete, second.complete) == (False, True)


def test_only_the_last_schemas_are_kept():
    constraints = ConstraintFactory(tiny().tokenizer)
    for number in range(MAX_COMPILED + 3):
        constraints.constraint(json.dumps({"const": number}))
    assert len(constraints._compiled) == MAX_COMPILED
    assert json.dumps({"const": 2}) not in constraints._compiled
    assert json.dumps({"const": 3}) in constraints._compiled


def test_an_end_is_allowed_only_where_the_text_could_end():
    one = constrained({"type": "integer"})
    ends = tiny().tokenizer.eos_ids
    assert not ends & set(ids(one.allowed()))
    (seven,) = tiny().tokenizer.encode("7")
    one.accept(seven)
    assert ends <= set(ids(one.allowed()))
    assert not one.complete


def test_no_control_token_is_text():
    one = constrained({"type": "string"})
    one.accept(tiny().tokenizer.encode('"')[0])
    names = {each for each in ids(one.allowed()) if tiny().tokenizer.control_name(each)}
    assert names == set()


def test_blanks_between_two_parts_are_bounded():
    one = constrained(ANY_OBJECT)
    for letter in "{\n   ":
        one.accept(tiny().tokenizer.encode(letter)[0])
    assert tiny().tokenizer.encode("\n")[0] not in ids(one.allowed())
    for _ in range(9):
        one.accept(tiny().tokenizer.encode(" ")[0])
    assert tiny().tokenizer.encode(" ")[0] not in ids(one.allowed())


@pytest.mark.parametrize(
    ("schema", "words"),
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
def test_what_cannot_be_enforced_is_refused_by_name(schema, words):
    for check in (check_schema, ConstraintFactory(tiny().tokenizer).constraint):
        with pytest.raises(ConstraintError) as refused:
            check(json.dumps(schema))
        assert words in str(refused.value)


def test_a_schema_nested_beyond_all_reason_is_refused():
    deep = '{"items":' * 500 + "{}" + "}" * 500
    with pytest.raises(ConstraintError, match="recursion"):
        check_schema(deep)


def test_a_schema_that_is_too_much_work_ends_its_own_answer():
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2500)}}
    with pytest.raises(ConstraintError, match="cannot be enforced"):
        walked(constrained(wide), random.Random(0))


def test_without_the_library_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingLibraryError, match=r"omni-proxy\[replica\]"):
        constraint.check_schema(ANY_OBJECT)


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
