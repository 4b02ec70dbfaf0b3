import json
import random

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.replica.text.json_schema import (
    ANY_OBJECT,
    MAX_COMPILED,
    MAX_SCHEMA_BYTES,
    ConstraintError,
    ConstraintFactory,
    MissingLibraryError,
    check_schema,
)
from tests.example_counts import examples
from tests.replica.text.scheduler_harness import tiny

pytest.importorskip("llguidance")

WORDS = st.text("abc", min_size=1, max_size=4)
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
        check_schema(ANY_OBJECT)
