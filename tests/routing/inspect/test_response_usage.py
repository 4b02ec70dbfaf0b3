"""Token counts at the end of a response, in the formats of the engines. Counting many responses at
once equals counting each of them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.response_usage import (
    TAIL_BYTES,
    count_tokens,
    counts_in,
    estimate_prompt,
    read_cached_tokens,
    tokens_in,
)

COUNTS = st.integers(0, 10**9)
BODIES = (
    b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}',
    b'{"usage": {"prompt_tokens": 30, "completion_tokens": 40}, "metadata": {"a": []}}',
    b'{"usage": {"input_tokens": 5, "output_tokens": 6}}',
    b'{"usage": null}',
    b'{"text": "no usage at all"}',
    b"",
    b"no JSON",
    b'{"usage": {"prompt_tokens": 1, "completion_tokens": 2',
    b'{"usage": {"prompt_tokens": 1, "completion_tokens": 2}}, {"usage": {}',
    b'{"usage": {"prompt_tokens": -1, "completion_tokens": 2}}',
)
ENDED = st.lists(
    st.tuples(st.sampled_from(BODIES), st.integers(0, 99), st.sampled_from([200, 404, 500]))
)
DETAILS = {
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 32},
}


def body(value):
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("response", "counts"),
    [
        (body({"choices": [], "usage": DETAILS}), (32, 40)),
        (b"data: " + body({"choices": [], "usage": DETAILS}) + b"\n\ndata: [DONE]\n\n", (32, 40)),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":16},"prompt_tokens":20}}', (16, 20)),
        (body({"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}}}), (8, 9)),
        (body({"text": "a", "meta_info": {"prompt_tokens": 7, "cached_tokens": 0}}), (0, 7)),
        (body({"usage": {"input_tokens": 5, "cache_read_input_tokens": 16}}), (16, 21)),
        (
            body({"usage": {"input_tokens": 5, "cache_creation_input_tokens": 4,
                            "cache_read_input_tokens": 1}}),
            (1, 10),
        ),
        # The counts of several choices for one prompt were added up.
        (body({"usage": {"prompt_tokens": 4, "x": {"cached_tokens": 12}}}), (4, 4)),
        # Log probabilities stand between the two counts.
        (
            body({"meta_info": {"prompt_tokens": 7, "logprobs": [0] * TAIL_BYTES,
                                "cached_tokens": 3}}),
            (3, 7),
        ),
    ],
)  # fmt: skip
def test_cached_tokens_are_read_in_the_formats_of_all_engines(response, counts):
    assert read_cached_tokens(response) == counts


@pytest.mark.parametrize(
    "response",
    [
        b"",
        body({"usage": {"prompt_tokens": 40, "prompt_tokens_details": None}}),
        body({"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": None}}}),
        body({"usage": {"prompt_tokens": 40, "details": {"cached_tokens": -1}}}),
        body({"usage": {"prompt_tokens": 40, "details": {"cached_tokens": 1.5}}}),
        body({"usage": {"prompt_tokens": 40, "details": {"cached_tokens": "1"}}}),
        body({"usage": {"prompt_tokens": 40, "details": {"cached_tokens": 10**10}}}),
        body({"usage": {"prompt_tokens": 10**10, "details": {"cached_tokens": 1}}}),
        body({"usage": {"prompt_tokens": 10**10, "prompt_tokens_details": {"cached_tokens": 1}}}),
        body({"usage": {"prompt_tokens": 0, "details": {"cached_tokens": 0}}}),
        body({"usage": {"details": {"cached_tokens": 3}}}),
        body({"usage": {"cache_read_input_tokens": 3}}),
        body({"choices": [{"text": '"prompt_tokens": 4, "cached_tokens": 3'}]}),
        b'{"usage":{"prompt_tokens":40,"details":{"cached_tokens":1e3}}}',
        b'{"usage":{"prompt_tokens":40,"details":{"cached_tok',
    ],
)
def test_a_response_without_both_counts_has_no_report(response):
    assert read_cached_tokens(response) is None


@given(COUNTS, st.integers(1, 10**9), st.booleans(), st.binary(max_size=20))
def test_the_last_counts_of_a_response_are_read(cached, prompt, spaced, tail):
    """As vLLM writes them, after another count of the same name."""
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + 3, "completion_tokens": 3, **details}
    separators = None if spaced else (",", ":")
    response = json.dumps(
        {"x": {"cached_tokens": 9}, "usage": usage}, separators=separators
    ).encode()
    assert read_cached_tokens(response) == (min(cached, prompt), prompt)
    later = response + b'{"cached_tokens":1,' + tail.replace(b'"', b"")
    assert read_cached_tokens(later) == (1, prompt)


@given(st.text(), COUNTS, st.integers(1, 10**9))
def test_generated_text_is_never_read_as_a_count(text, cached, prompt):
    usage = {"prompt_tokens": prompt, "details": {"cached_tokens": cached}}
    text += json.dumps(usage)
    expected = (min(cached, prompt), prompt)
    assert read_cached_tokens(body({"usage": usage, "text": text})) == expected
    assert read_cached_tokens(body({"text": text})) is None


@given(st.binary())
def test_any_bytes_are_read_without_an_error(data):
    cached, total = read_cached_tokens(data + b'"cached_tokens":' + data) or (0, 0)
    assert 0 <= cached <= total


USAGE_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**60),
    st.floats(allow_nan=False),
    st.text(max_size=3),
)
USAGE_NAMES = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "other")
BEFORE = st.text(max_size=20) | st.just("x" * 600)  # short responses are decoded whole


def naive_counts(usage):
    """For prompt and completion: the first field whose value is a valid count."""
    if not isinstance(usage, dict):
        return None, None

    def first(*names):
        counts = [usage.get(name) for name in names]
        return next((n for n in counts if type(n) is int and 0 <= n < 10**10), None)

    return first("prompt_tokens", "input_tokens"), first("completion_tokens", "output_tokens")


@given(
    st.dictionaries(st.sampled_from(USAGE_NAMES), USAGE_VALUES) | USAGE_VALUES,
    BEFORE,
    st.dictionaries(st.text(max_size=3).map("x".__add__), USAGE_VALUES, max_size=2),
    st.sampled_from([(b"", b""), (b"data: ", b"\n\ndata: [DONE]\n\n"), (b"[", b"]")]),
    st.sampled_from([None, 1]),
)
def test_counts_are_read_from_the_usage_whatever_surrounds_it(usage, before, after, around, indent):
    value = {"text": before, "usage": usage, **after}
    text = json.dumps(value, indent=indent).encode()
    assert counts_in(around[0] + text + around[1]) == naive_counts(usage)


def test_a_nested_usage_is_read_if_there_is_no_other():
    assert counts_in(b'{"response": {"usage": {"input_tokens": 1, "output_tokens": 2}}}') == (1, 2)


OPENAI = b'"usage":{"prompt_tokens":12,"completion_tokens":34,"total_tokens":46}'


@pytest.mark.parametrize(
    "tail",
    [
        b'{"id":"x","choices":[],' + OPENAI + b"}",
        b'data: {"choices":[],' + OPENAI + b"}\n\ndata: [DONE]\n\n",
        b'data: {"usage":null}\n\ndata: {"choices":[], "usage" : {"input_tokens": 12, '
        b'"output_tokens": 34}}\n\n',
        b'14\r\ndata: {"usage": null}\n\n\r\n60\r\ndata: {' + OPENAI + b"}\n\n\r\n0\r\n\r\n",
    ],
)
def test_tokens_are_those_of_the_last_usage(tail):
    assert tokens_in(tail) == {"input": 12, "output": 34}


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"choices":[]}',
        b'{"usage":null}',
        b'{"usage":{"prompt_tok',
        b'{"usage":{"prompt_tokens":"many","completion_tokens":true}}',
        b'{"usage":{"prompt_tokens":-1,"completion_tokens":1e400}}',
        b'{"usage":[[' + b"[" * 5000,
        b'{"usage":7}',
    ],
)
def test_a_response_without_valid_counts_has_no_tokens(tail):
    assert tokens_in(tail) == {}


def test_a_usage_may_have_only_one_of_the_counts():
    assert tokens_in(b'{"usage":{"prompt_tokens":5}}') == {"input": 5}


@given(st.binary())
def test_tokens_of_any_bytes_are_read_without_an_error(tail):
    assert tokens_in(b'"usage"' + tail).keys() <= {"input", "output"}


@given(ENDED)
def test_the_total_of_several_responses_is_the_sum_of_each(ended):
    alone = [count_tokens([response]) for response in ended]
    assert count_tokens(ended) == tuple(map(sum, zip((0, 0), *alone, strict=True)))


@given(st.lists(st.sampled_from(BODIES[:2]), min_size=1))
def test_the_usage_of_a_response_is_counted(bodies):
    tens = sum(b"30" in body for body in bodies)
    units = len(bodies) - tens
    ended = [(body, 9, 200) for body in bodies]
    assert count_tokens(ended) == (3 * units + 30 * tens, 4 * units + 40 * tens)


def test_the_tokens_of_a_response_without_usage_are_estimated():
    estimate = count_tokens([(b"12345678", 41, 200)])
    assert estimate == (11, 2)
    assert count_tokens([(b"12345678", 41, 500)]) == (0, 0)


def test_the_tokens_of_a_prompt_are_estimated_by_its_size():
    assert [estimate_prompt(size) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]
