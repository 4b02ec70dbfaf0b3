import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import examples

pytest.importorskip("google.protobuf", reason="the extra `picker` is not installed")

from omni_proxy.picker.ext_proc.messages import (
    CHUNK_BYTES,
    DESTINATION,
    SUBSET,
    SUBSET_NAMESPACE,
    Destination,
    subset_of,
)
from omni_proxy.picker.ext_proc.protocol import (
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingMode,
    ProcessingRequest,
    ProtocolConfiguration,
)
from omni_proxy.picker.ext_proc.stream import EnvoyStream
from omni_proxy.wire.errors import HttpError

NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX = (
    ProcessingMode.NONE,
    ProcessingMode.STREAMED,
    ProcessingMode.BUFFERED,
    ProcessingMode.BUFFERED_PARTIAL,
    ProcessingMode.FULL_DUPLEX_STREAMED,
)
PICKED = Destination("10.0.0.1:80", {"x-a": "b"}, ("authorization",))


def head(mode=BUFFERED, response_mode=STREAMED, *, end=False, config=True, **headers):
    message = ProcessingRequest(
        request_headers=HttpHeaders(headers=header_map(headers), end_of_stream=end)
    )
    if config:
        message.protocol_config.CopyFrom(
            ProtocolConfiguration(request_body_mode=mode, response_body_mode=response_mode)
        )
    return message


def header_map(headers):
    pairs = {":method": "POST", ":path": "/v1/chat/completions", **headers}
    return HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in pairs.items()])


def request_body(body, *, end=True):
    return ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=end))


def response_body(body, *, end):
    return ProcessingRequest(response_body=HttpBody(body=body, end_of_stream=end))


def response_head(status="200", *, end=False):
    headers = HeaderMap(headers=[HeaderValue(key=":status", raw_value=status.encode())])
    return ProcessingRequest(response_headers=HttpHeaders(headers=headers, end_of_stream=end))


def kinds(responses):
    return [response.WhichOneof("response") for response in responses]


def mutations(response):
    common = getattr(response, response.WhichOneof("response")).response
    set_headers = {o.header.key: o.header.raw_value for o in common.header_mutation.set_headers}
    return set_headers, list(common.header_mutation.remove_headers), common.clear_route_cache


@pytest.mark.parametrize(
    ("mode", "end", "config"),
    [(NONE, False, True), (STREAMED, False, True), (BUFFERED, True, True), (DUPLEX, True, True)],
)
def test_without_a_body_to_wait_for_the_head_response_has_the_pick(mode, end, config):
    stream = EnvoyStream(100)
    assert stream.receive(head(mode, end=end, config=config)) == []
    assert (stream.pending.body, stream.pending.headers[":method"]) == (b"", "POST")
    (response,) = stream.picked(PICKED)
    assert response.WhichOneof("response") == "request_headers"
    assert mutations(response) == (
        {DESTINATION: b"10.0.0.1:80", "x-a": b"b"},
        ["authorization"],
        True,
    )
    assert response.dynamic_metadata["envoy.lb"][DESTINATION] == "10.0.0.1:80"


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("mode", [BUFFERED, PARTIAL])
def test_a_buffered_body_is_changed_only_if_the_destination_has_another(mode, config):
    stream = EnvoyStream(100)
    assert kinds(stream.receive(head(mode, config=config))) == ["request_headers"]
    assert stream.pending is None
    assert stream.receive(request_body(b"{}")) == []
    assert stream.pending.body == b"{}"
    (response,) = stream.picked(PICKED)
    assert response.WhichOneof("response") == "request_body"
    assert not response.request_body.response.HasField("body_mutation")
    other = EnvoyStream(100)
    other.receive(head(mode))
    other.receive(request_body(b"{}"))
    (response,) = other.picked(Destination("10.0.0.1:80", body=b"[1]"))
    assert response.request_body.response.body_mutation.body == b"[1]"
    assert mutations(response)[0]["content-length"] == b"3"


@given(st.lists(st.binary(max_size=40), max_size=5), st.booleans(), st.booleans())
@settings(max_examples=examples(100))
def test_a_duplex_body_is_returned_whole_with_one_end(parts, trailers, replaced):
    parts = [*parts, b"" if not parts else b"x" * (CHUNK_BYTES + 1)]
    stream, responses = EnvoyStream(10**9), []
    assert stream.receive(head(DUPLEX, DUPLEX)) == []
    for index, part in enumerate(parts):
        last = index == len(parts) - 1 and not trailers
        assert stream.receive(request_body(part, end=last)) == []
    if trailers:
        assert stream.receive(ProcessingRequest(request_trailers=HttpTrailers())) == []
    body = b"other" if replaced else b"".join(parts)
    responses = stream.picked(Destination("a:1", body=b"other" if replaced else None))
    chunks = [a.request_body for a in responses if a.WhichOneof("response") == "request_body"]
    streamed = [chunk.response.body_mutation.streamed_response for chunk in chunks]
    assert b"".join(each.body for each in streamed) == body
    assert all(len(each.body) <= CHUNK_BYTES for each in streamed)
    assert [each.end_of_stream for each in streamed] == [False] * (len(streamed) - 1) + [
        not trailers
    ]
    assert kinds(responses)[0] == "request_headers"
    assert (kinds(responses)[-1] == "request_trailers") == trailers
    assert ("content-length" in mutations(responses[0])[0]) != trailers


@pytest.mark.parametrize("mode", [STREAMED, DUPLEX])
def test_a_response_is_passed_on_and_complete_with_its_last_byte(mode):
    stream = EnvoyStream(100)
    stream.receive(head(BUFFERED, mode, end=True))
    stream.picked(PICKED)
    assert kinds(stream.receive(response_head("503"))) == ["response_headers"]
    assert (stream.status, stream.complete) == (503, False)
    (response,) = stream.receive(response_body(b"abc", end=False))
    streamed = response.response_body.response.body_mutation.streamed_response
    assert streamed.body == (b"abc" if mode == DUPLEX else b"")
    assert not stream.complete
    stream.receive(response_body(b"", end=True))
    assert (stream.complete, stream.bytes_out, stream.chunks, stream.last_chunk) == (
        True, 3, 1, b"abc",
    )  # fmt: skip


def test_a_response_without_a_body_or_with_trailers_is_complete():
    for last in (
        response_head(end=True),
        ProcessingRequest(response_trailers=HttpTrailers()),
    ):
        stream = EnvoyStream(100)
        stream.receive(head(end=True))
        stream.picked(PICKED)
        stream.receive(last)
        assert stream.complete


def test_a_body_above_the_limit_is_refused_and_held_bytes_are_counted():
    stream = EnvoyStream(5)
    stream.receive(head(DUPLEX, DUPLEX))
    stream.receive(request_body(b"123", end=False))
    assert stream.held_bytes == 3
    with pytest.raises(HttpError) as refused:
        stream.receive(request_body(b"456", end=False))
    (response,) = stream.refused(refused.value)
    assert (response.immediate_response.status.code, stream.over) == (413, True)


def test_a_refusal_has_the_proxys_own_error_and_its_headers():
    stream = EnvoyStream(5)
    stream.receive(head(end=True))
    error = HttpError(503, "no worker", "none_healthy").with_headers(("retry-after", "1"))
    (response,) = stream.refused(error)
    reply = response.immediate_response
    assert reply.body == error.body()
    sent = {each.header.key: each.header.raw_value for each in reply.headers.set_headers}
    assert sent == {"content-type": b"application/json", "retry-after": b"1"}


def test_an_empty_message_is_an_error():
    with pytest.raises(ValueError, match="not a message"):
        EnvoyStream(5).receive(ProcessingRequest())


def test_a_subset_can_be_a_list_a_string_or_empty():
    message = head()
    assert subset_of(message) is None
    hint = message.metadata_context.filter_metadata[SUBSET_NAMESPACE]
    hint.update({SUBSET: "10.0.0.1:80, 10.0.0.2:80"})
    assert subset_of(message) == {"10.0.0.1:80", "10.0.0.2:80"}
    hint.update({SUBSET: ["10.0.0.3:80"]})
    assert subset_of(message) == {"10.0.0.3:80"}
    hint.update({SUBSET: []})
    assert subset_of(message) == frozenset()


@pytest.mark.parametrize("response_mode", [NONE, STREAMED])
def test_without_the_response_body_a_response_ends_with_the_stream(response_mode):
    stream = EnvoyStream(100)
    stream.receive(head(BUFFERED, response_mode, end=True))
    stream.picked(PICKED)
    assert not stream.ends_unseen
    stream.receive(response_head())
    assert stream.ends_unseen == (response_mode == NONE)


def test_a_second_head_or_a_body_without_one_is_refused():
    stream = EnvoyStream(100)
    stream.receive(head(end=True))
    with pytest.raises(ValueError, match="a second request_headers"):
        stream.receive(head(end=True))
    with pytest.raises(ValueError, match="request_header_mode must be SEND"):
        EnvoyStream(100).receive(request_body(b"x"))


def test_a_response_of_envoy_before_the_request_head_is_passed_on():
    stream = EnvoyStream(100)
    assert kinds(stream.receive(response_head("401", end=True))) == ["response_headers"]
    assert (stream.pending, stream.complete, stream.status) == (None, True, 401)


@pytest.mark.parametrize(
    "status", ["", "9" * 30, "9" * 5000, "-5", "0", "099", "20", "\u0662\u0660\u0660"]
)
def test_an_invalid_status_is_read_as_zero(status):
    stream = EnvoyStream(100)
    stream.receive(response_head(status))
    assert stream.status == 0
