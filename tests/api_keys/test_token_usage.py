import pytest

from omni_proxy.api_keys.token_usage import estimate_prompt, max_tokens_in


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
def test_the_bound_of_the_completion_is_read_where_the_body_has_one(body, count):
    assert max_tokens_in(body) == count


def test_a_prompt_is_guessed_by_its_size_rounded_up():
    assert [estimate_prompt(size) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]
