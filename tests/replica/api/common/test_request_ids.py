from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.replica.api.common.request_ids import id_matcher
from tests.example_counts import examples


@settings(max_examples=examples(60))
@given(st.text("ab-", min_size=1, max_size=6), st.integers(0, 12))
def test_a_request_matches_its_sent_and_its_returned_ids(request_id, choice):
    for sent_id in (
        request_id,
        f"chatcmpl-{request_id}",
        f"cmpl-{request_id}",
        f"generate-tokens-{request_id}",
    ):
        assert id_matcher([sent_id])(request_id)
        assert id_matcher([sent_id])(f"{request_id}-{choice}")
    assert not id_matcher([request_id])(f"{request_id}x")
