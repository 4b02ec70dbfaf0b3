"""Counting the tokens of many responses at once equals counting each of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.dataplane.exchange.token_usage import count_tokens, estimate_prompt, max_tokens_in

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


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b'{"max_tokens": 64}', 64),
        (b'{"max_completion_tokens":7,"messages":[]}', 7),
        (b'{"sampling_params":{"max_new_tokens" : 9}}', 9),
        (b'{"max_output_tokens":5}', 5),
        (b'{"max_tokens":null}', 0),
        (b'{"prompt":"say \\"max_tokens\\": 99"}', 0),
        (b"", 0),
    ],
)
def test_the_limit_of_completion_tokens_is_read_from_the_body(body, count):
    assert max_tokens_in(body) == count


def test_the_tokens_of_a_prompt_are_estimated_by_its_size():
    assert [estimate_prompt(size) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]
