"""JSON bodies decoded into Structs, compared with pydantic, whose 422 responses clients expect."""

import json
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.api.common.errors import InvalidBody
from omni_proxy.replica.api.common.lenient_decode import MAX_PROBLEMS, MISSING, _not_json, validate


class Message(msgspec.Struct):
    role: str
    content: Any = None


class Body(msgspec.Struct):
    messages: list[Message]
    number: float | None = None
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    flag: bool | None = None
    stop: str | list[str] | None = None
    held: dict[str, Any] | None = None
    kind: Literal["a", "b"] | None = None


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    known: int | None = None


class PydanticMessage(pydantic.BaseModel):
    role: str
    content: Any = None


class PydanticBody(pydantic.BaseModel):
    messages: list[PydanticMessage]
    number: Annotated[float, pydantic.Field(allow_inf_nan=False)] | None = None
    count: Annotated[int, pydantic.Field(ge=1)] | None = None
    share: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    flag: bool | None = None
    stop: str | list[str] | None = None
    held: dict[str, Any] | None = None
    kind: Literal["a", "b"] | None = None


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.5, -1.5])
    | st.sampled_from(["", "5", " 7 ", "2.0", "x", "1e3", "yes", "NO", "t", "a", "b", "-1"])
)
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.sampled_from("ab"), scalars)
messages = st.lists(st.dictionaries(st.sampled_from(["role", "content"]), values), max_size=2)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "messages": messages | values,
        **dict.fromkeys(("number", "count", "share", "flag", "stop", "held", "kind"), values),
    },
)


def problems_of_pydantic(body):
    try:
        return PydanticBody.model_validate(body, from_attributes=True).model_dump(), []
    except pydantic.ValidationError as error:
        problems = json.loads(error.json(include_url=False))
        return None, [problem | {"loc": ["body", *problem["loc"]]} for problem in problems]


@given(bodies | values)
def test_problems_and_values_are_those_of_pydantic(body):
    expected, problems = problems_of_pydantic(body)
    if problems:
        with pytest.raises(InvalidBody) as refused:
            validate(Body, body)
        assert refused.value.problems == problems
    else:
        assert msgspec.to_builtins(validate(Body, body)) == expected


def test_a_missing_body_is_a_problem_of_type_missing():
    with pytest.raises(InvalidBody) as refused:
        validate(Body, MISSING)
    missing = {"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}
    assert refused.value.problems == [missing]


def test_an_unknown_key_is_a_problem_only_where_it_is_forbidden():
    assert validate(Body, {"messages": [], "more": 1}).messages == []
    with pytest.raises(InvalidBody) as refused:
        validate(Strict, {"more": 1})
    assert refused.value.problems[0]["type"] == "extra_forbidden"


@pytest.mark.parametrize("number", ["inf", "nan", "-Infinity"])
def test_a_number_that_is_not_finite_is_refused(number):
    with pytest.raises(InvalidBody) as refused:
        validate(Body, {"messages": [], "number": number})
    assert refused.value.problems[0]["type"] == "finite_number"


async def test_invalid_json_is_reported_with_its_position(api):
    for body, position, reason in (
        (b'{"a": ', 6, "Expecting value"),
        (b"\xff", 0, "Not UTF-8"),
        (b'{"a": "\xff"}', 7, "Not UTF-8"),
        (b'{"a": NaN}', 0, "Not a JSON value"),
        (b"[" * 100_000, 0, "Nested too deeply"),
    ):
        response = await api.post("/v1/chat/completions", body)
        (problem,) = (await response.get_json())["detail"]
        assert (problem["type"], problem["loc"]) == ("json_invalid", ["body", position])
        assert problem["ctx"]["error"].startswith(reason)


def test_only_the_first_of_very_many_problems_are_reported():
    for messages in ([1] * 1000, [{}] * 1000):
        with pytest.raises(InvalidBody) as refused:
            validate(Body, {"messages": messages, "stop": [1] * 1000})
        locations = [problem["loc"][:3] for problem in refused.value.problems]
        assert locations == [["body", "messages", index] for index in range(MAX_PROBLEMS)]


@pytest.mark.parametrize("number", [10**400, -(10**400), 2**64])
def test_an_integer_too_large_for_a_float_is_not_a_boolean(number):
    with pytest.raises(InvalidBody) as refusal:
        validate(Body, {"messages": [], "flag": number})
    assert [problem["type"] for problem in refusal.value.problems] == ["bool_parsing"]


def test_a_number_with_too_many_digits_is_invalid_json():
    problem = _not_json(b'{"a": ' + b"9" * 5000 + b"}")
    assert (problem["type"], problem["ctx"]) == (
        "json_invalid",
        {"error": "A number has too many digits"},
    )
