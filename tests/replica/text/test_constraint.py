import json
import random

import jsonschema_rs
import pytest
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
    check_schema,
)
from tests.replica.text.scheduler_harness import tiny

pytest.importorskip("llguidance")

WORDS = st.text("abc", min_size=1, max_size=4)
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
    """A text of tokens that are drawn from all that are allowed."""
    written = b""
    for _ in range(most):
        if one.complete:
            break
        token = chance.choice(ids(one.allowed()))
        one.accept(token)
        written += tiny().tokenizer.token_bytes(token)
    return written.decode(errors="replace")


@settings(max_examples=60, deadline=None)
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


def test_blanks_between_two_parts_do_not_go_on_for_ever():
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
        ({"enum": ["x" * MAX_SCHEMA_BYTES]}, f"at most {MAX_SCHEMA_BYTES}"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema, words):
    for refusing in (check_schema, ConstraintFactory(tiny().tokenizer).constraint):
        with pytest.raises(ConstraintError) as refused:
            refusing(json.dumps(schema))
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
