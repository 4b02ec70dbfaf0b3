"""Which rank a client names, and the body that tells an engine its rank, against plain JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.routing.inspect.large_json import LARGE_BYTES
from omni_proxy.routing.inspect.requirements import (
    ANY_RANK,
    RequestFacts,
    Requirements,
    inspect_request,
)
from omni_proxy.routing.rank_pinning import (
    BODY_KEY,
    OLD_BODY_KEY,
    body_for_rank,
    candidates_of_rank,
    may_name_rank,
    pin_to_rank,
)
from omni_proxy.routing.routes import match_route
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RANK_HINT
from tests.fleet.entries import entry, fleet_of

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
    """The rank that is named; "refused" for one that is no rank, and for two."""
    named = [body[key] for key in KEYS if body.get(key) is not None]
    if any(type(value) is not int or value < 0 for value in named):
        return "refused"
    ranks = {*named, *([] if header is None else [header])}
    return "refused" if len(ranks) > 1 else next(iter(ranks), ANY_RANK)


@given(
    pairs=members, header=st.none() | st.integers(0, 7), blank=st.sampled_from(["", " ", "\n\t"])
)
def test_the_rank_is_that_of_the_header_or_of_one_of_two_keys(pairs, header, blank):
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
def test_the_engine_gets_one_key_more_and_everything_else_as_it_was(rank, padding, pairs):
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
def test_a_key_that_is_spelled_with_escapes_names_a_rank(spelled, padding):
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


def test_a_body_without_such_a_key_is_not_looked_at():
    assert not may_name_rank('{"text": "h\u00e4"}'.encode())
    assert not may_name_rank(b"")


@pytest.mark.parametrize("value", [b"9" * 5000, b"0" * 5000 + b"1"])
def test_a_number_of_many_digits_is_no_rank(value):
    for hints, text in (({RANK_HINT: value}, b"{}"), ({}, b'{"routed_dp_rank": %b}' % value)):
        with pytest.raises(HttpError) as refused:
            pin_to_rank(read(text), hints, text)
        assert refused.value.status == 400


def test_a_key_within_another_value_names_nothing():
    text = b'{"sampling_params": {"routed_dp_rank": 3}, "text": "\\"routed_dp_rank\\": 4"}'
    need = read(text)
    pin_to_rank(need, {}, text)
    assert need.dp_rank == ANY_RANK


def test_a_request_without_a_json_body_names_a_rank_by_header_alone():
    need = Requirements(1)
    pin_to_rank(need, {RANK_HINT: b"2"}, b'{"routed_dp_rank": 3}')
    assert (need.dp_rank, need.names_rank_in_body) == (2, False)


def test_a_worker_without_ranks_is_its_own_rank_0():
    fleet = fleet_of(entry("a", ranks=2), entry("b"))
    names = [
        [target.display_id for target in candidates_of_rank(fleet.candidates(None, 1), index)]
        for index in range(3)
    ]
    assert names == [["a:1@0", "b:1"], ["a:1@1"], []]
