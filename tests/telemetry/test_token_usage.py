import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.telemetry.token_usage import tokens_in

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
def test_the_last_usage_counts_whatever_is_around_it(tail):
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
def test_what_reports_no_counts_reports_none(tail):
    assert tokens_in(tail) == {}


def test_one_of_the_two_is_enough():
    assert tokens_in(b'{"usage":{"prompt_tokens":5}}') == {"input": 5}


@given(st.binary())
def test_no_bytes_make_it_fail(tail):
    tokens_in(b'"usage"' + tail)
