import msgspec
import pytest

from omni_proxy.picker.pick_request import head_of, read_selection
from omni_proxy.wire.errors import HttpError


def read(**keys):
    return read_selection(msgspec.json.encode(keys))


def test_without_a_request_the_body_itself_is_the_model_request():
    body = b'{"selection_id": "s1",  "model": "m", "token_ids": [1, 2], "lease_secs": 3}'
    selection = read_selection(body)
    assert (selection.selection_id, selection.lease_secs) == ("s1", 3)
    assert selection.request.body == body
    assert selection.request.head.log_words[2] == "/v1/chat/completions"


def test_the_request_keeps_its_bytes_and_has_its_path_and_headers():
    selection = read_selection(
        b'{"path": "/generate", "request": { "text":"x" }, "session_id": "me",'
        b' "headers": {"X-Omni-Min-Weight-Epoch": "3", "content-length": "99"}}'
    )
    request = selection.request
    assert request.body == b'{ "text":"x" }'
    assert request.session == b"me"
    assert request.head.length == len(request.body)
    assert request.head.hints == {b"min-weight-epoch": b"3"}
    assert request.head.target == b"/generate"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "not a selection"),
        (b"[]", "not a selection"),
        (b'{"lease_secs": 0}', "lease_secs"),
        (b'{"lease_secs": 1e9}', "lease_secs"),
        (b'{"lease_secs": "1"}', "lease_secs"),
        (b'{"selection_id": 1}', "selection_id"),
        (b'{"selection_id": "a\\nb"}', "selection_id"),
        (b'{"selection_id": "' + b"x" * 257 + b'"}', "selection_id"),
        (b'{"path": "generate"}', "path"),
        (b'{"headers": {"a": "b\\r\\nhost: x"}}', "line break"),
        (b'{"headers": {"a": "\\u20ac"}}', "Latin-1"),
        (b'{"headers": {"a b": "c"}}', ""),
    ],
)
def test_a_wrong_selection_is_refused_by_the_name_of_its_key(body, named):
    with pytest.raises(HttpError) as refused:
        read_selection(body)
    assert refused.value.status == 400
    assert named in refused.value.message


def test_an_empty_body_asks_for_any_worker():
    assert read_selection(b"").request.body == b""
    assert read(model_name="m").request.model == "m"


def test_the_content_type_of_a_head_is_kept():
    assert head_of("POST", "/x", {"Content-Type": "text/plain"}, 0).content_type == b"text/plain"
