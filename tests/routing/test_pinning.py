"""The rank, voice, worker or stored response that pins a request.

Expected ranks and bodies are computed with Python's `json`.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.fleet.worker import Worker, capability_mask
from omni_proxy.routing.inspect.body_fields import decode_body
from omni_proxy.routing.inspect.large_json import LARGE_BYTES
from omni_proxy.routing.inspect.requirements import (
    ANY_RANK,
    AUDIO,
    RequestFacts,
    Requirements,
    inspect_request,
)
from omni_proxy.routing.pinning import (
    BODY_KEY,
    OLD_BODY_KEY,
    SCANNED_BYTES,
    ResponseIdScanner,
    body_for_rank,
    candidates_of_rank,
    may_name_rank,
    named_response,
    own_response_owners,
    pin_to_rank,
    pin_to_response_owner,
    pin_to_voice_owner,
    voice_names,
)
from omni_proxy.routing.routes import NAMED, RESPONSE_OWNER, UNPINNED, VOICE_OWNER, match_route
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.header_fields import RANK_HINT
from tests.fleet.entries import NOW, entry, fleet_of

GENERATE = match_route("POST", "/generate")
KEYS = [BODY_KEY, OLD_BODY_KEY]
values = st.sampled_from([None, 0, 1, 7, -1, 1.0, "1", True, [1], {"a": 1}])
other_keys = st.text(max_size=5).filter(lambda key: key not in KEYS)
members = st.lists(
    st.tuples(other_keys | st.sampled_from(KEYS), values),
    max_size=6,
    unique_by=lambda pair: pair[0],
)


@pytest.fixture(scope="module")
def rank() -> DpRank:
    return fleet_of(entry("a", ranks=8)).workers[0].dp_ranks[5]


def read(body: bytes) -> Requirements:
    return inspect_request(GENERATE, body, RequestFacts(b"application/json"))


def naive(body: dict, header: int | None):
    """The rank that a request names, or "refused": for an invalid rank, and for two ranks."""
    named = [body[key] for key in KEYS if body.get(key) is not None]
    if any(type(value) is not int or value < 0 for value in named):
        return "refused"
    ranks = {*named, *([] if header is None else [header])}
    return "refused" if len(ranks) > 1 else next(iter(ranks), ANY_RANK)


@given(
    pairs=members, header=st.none() | st.integers(0, 7), blank=st.sampled_from(["", " ", "\n\t"])
)
def test_the_rank_is_read_from_the_header_or_from_one_of_two_keys(pairs, header, blank):
    body = dict(pairs)
    text = (blank + json.dumps(body)).encode()
    hints = {} if header is None else {RANK_HINT: b"%d" % header}
    need = read(text)
    expected = naive(body, header)
    if expected == "refused":
        with pytest.raises(HttpError) as refused:
            pin_to_rank(need, hints, text)
        assert (refused.value.status, refused.value.code) == (400, "invalid_rank")
        return
    pin_to_rank(need, hints, text)
    assert need.dp_rank == expected
    assert need.names_rank_in_body == any(body.get(key) is not None for key in KEYS)


@pytest.mark.parametrize("padding", [0, LARGE_BYTES])
@given(pairs=members)
def test_the_body_for_the_engine_differs_only_by_the_added_rank(rank, padding, pairs):
    body = {key: value for key, value in pairs if key not in KEYS or value is None}
    if padding:
        body["a long text"] = "a" * padding
    text = json.dumps(body).encode()
    need = read(text)
    pin_to_rank(need, {}, text)
    sent = b"".join(body_for_rank("/generate", need, rank, text))
    assert json.loads(sent) == {**body, BODY_KEY: 5}
    assert sent.count(b'"routed_dp_rank"') == 1
    if BODY_KEY not in body:
        assert sent.replace(b'"routed_dp_rank":5,', b"").replace(b'"routed_dp_rank":5', b"") == text
    assert body_for_rank("/v1/chat/completions", need, rank, text) == [text]


@pytest.mark.parametrize("where", KEYS)
def test_a_body_that_names_its_rank_is_not_changed(rank, where):
    text = b'{"%b": 5}' % where.encode()
    need = read(text)
    pin_to_rank(need, {}, text)
    assert body_for_rank("/generate", need, rank, text) == [text]


@pytest.mark.parametrize("padding", [0, LARGE_BYTES])
@pytest.mark.parametrize("spelled", [r"routed\u005fdp_rank", r"data_parallel_r\u0061nk"])
def test_a_key_written_with_escapes_names_a_rank(spelled, padding):
    text = f'{{"{spelled}": 5, "long": "{"a" * padding}"}}'.encode()
    need = read(text)
    pin_to_rank(need, {}, text)
    assert (need.dp_rank, need.names_rank_in_body) == (5, True)
    with pytest.raises(HttpError):
        pin_to_rank(read(text), {RANK_HINT: b"3"}, text)


ENCODINGS = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "utf-8-sig"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("key", KEYS)
def test_a_key_in_another_encoding_names_a_rank(encoding, key):
    text = f'{{"{key}": 5, "text": "h\u00e4"}}'.encode(encoding)
    assert may_name_rank(text)
    need = read(text)
    pin_to_rank(need, {}, text)
    assert (need.dp_rank, need.names_rank_in_body) == (5, True)
    with pytest.raises(HttpError):
        pin_to_rank(read(text), {RANK_HINT: b"3"}, text)


def test_a_body_without_such_a_key_needs_no_search():
    assert not may_name_rank('{"text": "h\u00e4"}'.encode())
    assert not may_name_rank(b"")


@pytest.mark.parametrize("value", [b"9" * 5000, b"0" * 5000 + b"1"])
def test_a_number_of_thousands_of_digits_is_refused(value):
    for hints, text in (({RANK_HINT: value}, b"{}"), ({}, b'{"routed_dp_rank": %b}' % value)):
        with pytest.raises(HttpError) as refused:
            pin_to_rank(read(text), hints, text)
        assert refused.value.status == 400


def test_a_key_inside_another_value_names_no_rank():
    text = b'{"sampling_params": {"routed_dp_rank": 3}, "text": "\\"routed_dp_rank\\": 4"}'
    need = read(text)
    pin_to_rank(need, {}, text)
    assert need.dp_rank == ANY_RANK


def test_without_a_json_body_only_the_header_can_name_a_rank():
    need = Requirements(1)
    pin_to_rank(need, {RANK_HINT: b"2"}, b'{"routed_dp_rank": 3}')
    assert (need.dp_rank, need.names_rank_in_body) == (2, False)


def test_a_worker_without_ranks_counts_as_rank_0():
    fleet = fleet_of(entry("a", ranks=2), entry("b"))
    names = [
        [target.display_id for target in candidates_of_rank(fleet.candidates(None, 1), index)]
        for index in range(3)
    ]
    assert names == [["a:1@0", "b:1"], ["a:1@1"], []]


OWNER = "http://a:1"


def speech_need(path, fields, *names):
    registry = VoiceRegistry()
    registry.voices_changed(OWNER)
    registry.set_names(registry.generation, names)
    route = match_route("POST", path)
    need = inspect_request(route, json.dumps(fields).encode(), RequestFacts(b"application/json"))
    pin_to_voice_owner(registry, route.traffic, need)
    return need


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"voice": "Bob"}, ["bob"]),
        ({"speaker": "Bob"}, ["bob"]),
        ({"voice": "a", "speaker": "b"}, ["a"]),
        ({"voice": "DEFAULT"}, []),
        ({"voice": 3}, []),
        ({"voice": [1], "speaker": "b"}, []),
        ({"voice": 0, "speaker": "b"}, ["b"]),
        ({"voice": float("nan"), "speaker": "NaN"}, []),
        ({"speed": float("nan"), "speaker": "NaN"}, ["nan"]),
        ({"voice": ""}, []),
        ({}, []),
        ({"voice": "Bob", "ref_audio": "x"}, []),
        ({"voice": "Bob", "references": [{"data": "x"}]}, []),
        ({"voice": "Bob", "references": [{"text": "x"}]}, ["bob"]),
        ({"voice": "Bob", "items": [{"input": "x"}, {"voice": "Ann"}]}, ["bob", "ann"]),
        ({"voice": "Bob", "items": [{"ref_audio": "x"}]}, []),
        ({"items": [{"input": "x"}, 4, None]}, []),
    ],
)
def test_the_voice_names_are_read_from_the_body(fields, names):
    assert list(voice_names(decode_body(json.dumps(fields).encode()))) == names


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/audio/speech/batch"])
def test_a_request_with_an_uploaded_voice_is_pinned_to_its_owner(path):
    need = speech_need(path, {"input": "x", "voice": "Bob", "items": [{"input": "x"}]}, "bob")
    assert need.pinning is VOICE_OWNER
    assert need.mask & AUDIO


@pytest.mark.parametrize("fields", [{"voice": "ann"}, {}, {"voice": "default"}])
def test_a_request_with_another_voice_may_go_to_any_worker(fields):
    assert speech_need("/v1/audio/speech", {"input": "x", **fields}, "bob").pinning is UNPINNED


def test_a_voice_in_a_chat_request_does_not_pin_it():
    assert speech_need("/v1/chat/completions", {"voice": "bob"}, "bob").pinning is UNPINNED


def test_a_partly_read_body_is_pinned_to_the_owner_of_any_voice():
    registry = VoiceRegistry()
    need = Requirements(0)
    pin_to_voice_owner(registry, "speech_http", need)
    assert need.pinning is UNPINNED
    registry.voices_changed(OWNER)
    pin_to_voice_owner(registry, "speech_http", need)
    assert need.pinning is VOICE_OWNER


def test_a_websocket_without_a_voice_may_go_to_any_worker():
    registry = VoiceRegistry()
    registry.voices_changed(OWNER)
    need = Requirements(0)
    pin_to_voice_owner(registry, "tts_websocket", need)
    assert need.pinning is UNPINNED


def scanned(*chunks):
    ids = []
    scanner = ResponseIdScanner(ids.append)
    for chunk in chunks:
        scanner.scan(chunk)
    return ids


UNARY = b'{"id":"resp_1","object":"response","output":[{"id":"msg_2"}]}'
FIRST = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1",'


@pytest.mark.parametrize(
    "chunks",
    [
        [UNARY],
        [b'{ "id" : "resp_1" }'],
        [FIRST, b'data: {"id": "other"}'],
        [b"", UNARY],
        [b"2f\r\n" + FIRST],
        [b'{"output":[{"id":"msg_2"}],"id":"resp_1"}'],
    ],
)
def test_the_id_of_a_response_is_found_in_its_first_bytes(chunks):
    assert scanned(*chunks) == ["resp_1"]


@given(st.integers(0, len(UNARY)))
def test_an_id_that_is_split_between_two_chunks_is_found_whole(at):
    assert scanned(UNARY[:at], UNARY[at:]) == ["resp_1"]


def test_an_id_of_another_form_is_accepted():
    assert scanned(b'{"id":"mine"}') == ["mine"]


def test_only_the_first_bytes_are_scanned():
    assert scanned(b"x" * SCANNED_BYTES, UNARY) == []


@given(st.lists(st.binary(max_size=200)))
def test_any_bytes_are_accepted(chunks):
    assert len(scanned(*chunks)) <= 1


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/responses/resp_1", b"", "resp_1"),
        ("/v1/responses/resp_1/cancel", b"", "resp_1"),
        ("/v1/responses/a%2Fb", b"", "a/b"),
        ("/v1/responses", b'{"previous_response_id": "resp_1"}', "resp_1"),
        ("/v1/responses", b'{"previous_response_id": null}', ""),
        ("/v1/responses", b'{"previous_response_id": 7}', ""),
        ("/v1/responses", b'{"input": "a"}', ""),
        ("/v1/responses", b"no json", ""),
        ("/v1/responses", b"", ""),
    ],
)
def test_a_request_names_a_response_by_path_or_body(path, body, named):
    assert named_response(path, body) == named


def test_a_request_for_a_response_is_pinned_to_its_owner_if_known():
    owners, worker = own_response_owners(), Worker(entry("a"), NOW)
    owners.keep("resp_1", worker, 0.0)
    for response_id, pinning in (("resp_1", NAMED), ("resp_2", UNPINNED), ("", UNPINNED)):
        need = Requirements(capability_mask(["chat"]), pinning=RESPONSE_OWNER)
        pin_to_response_owner(need, response_id, owners, 1.0)
        assert need.pinning is pinning
        assert need.named_worker == (worker.url if pinning is NAMED else "")


def test_the_table_of_response_owners_is_bounded():
    owners, worker = own_response_owners(), Worker(entry("a"), NOW)
    owners.tune(10, 0)
    for number in range(50):
        owners.keep(json.dumps(number), worker, 0.0)
    assert len(owners) == 10
    assert owners.find("49", 0.0) is worker
    assert owners.find("0", 0.0) is None
