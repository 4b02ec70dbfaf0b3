import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.bounded_json import (
    MAX_VALUES,
    SPARE_LEVELS,
    TooManyValues,
    max_value_count,
    read_json,
    without_lone_surrogates,
)
from omni_proxy.wire.errors import to_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def values_in(value) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + values_in(item) for item in value.values())
    return 1 + (sum(map(values_in, value)) if isinstance(value, list) else 0)


@given(value=JSON)
def test_values_are_read_as_by_json_and_never_too_few_are_counted(value):
    raw = json.dumps(value).encode()
    assert read_json(raw) == value
    assert max_value_count(raw) >= values_in(value)


@pytest.mark.parametrize("piece", [b"{},", b"[],", b"0,", b'{"a":', b"[", b'"a":0,'])
def test_a_text_with_too_many_values_is_not_read(piece):
    with pytest.raises(TooManyValues):
        read_json(piece * (MAX_VALUES + 1))


def test_one_long_string_is_one_value():
    raw = json.dumps("a" * 10 * MAX_VALUES).encode()
    assert len(read_json(raw, 2)) == 10 * MAX_VALUES


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 90_000, b"\xff", b"NaNa"])
def test_invalid_json_is_a_value_error(raw):
    with pytest.raises(ValueError, match=r"."):
        read_json(raw)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'["\\ud800", "\\ud83d\\ude00"]', ["\ud800", "\U0001f600"]),
        (b'{"a": Infinity}', {"a": math.inf}),
        ('"\u00e4"'.encode("utf-16"), "\u00e4"),
        (b"1" * 30, int("1" * 30)),
        (b"1e400", math.inf),
    ],
)
def test_json_that_only_lenient_parsers_accept_is_read_and_can_be_written(raw, value):
    assert read_json(raw) == value
    to_json(value)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'["\\ud800", "\\ud83d\\ude00"]', ["?", "\U0001f600"]),
        (b'["\\ud83d\\ude00"]', ["\U0001f600"]),
        (b"[NaN, 1]", [None, 1]),
    ],
)
def test_lone_surrogates_become_question_marks_in_rewritten_json(raw, value):
    written = json.loads(to_json(without_lone_surrogates(raw, read_json(raw))))
    assert written == value


def test_the_deepest_readable_value_can_be_written_with_more_levels():
    depths = []
    for depth in range(100, 1100):
        try:
            value = read_json(b"[" * depth + b"]" * depth)
        except ValueError:
            break
        depths.append(depth)
        for _ in range(SPARE_LEVELS - 20):
            value = [value]
        to_json(value)
    assert depths
