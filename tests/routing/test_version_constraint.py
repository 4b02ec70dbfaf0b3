import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.weight_version import UNKNOWN_VERSION, WeightVersion
from omni_proxy.routing.inspect.requirements import RequestFacts, inspect_request
from omni_proxy.routing.routes import match_route
from omni_proxy.routing.version_constraint import (
    EPOCH_HINT,
    VERSION_HINT,
    VersionConstraint,
    parse_version_constraint,
)
from omni_proxy.wire.errors import HttpError

LABELS = st.sampled_from(["v1", "v2", "é", "a b"])
ODD = "a\nb"


@pytest.mark.parametrize(
    ("hints", "constraint"),
    [
        ({}, None),
        ({b"model": b"m"}, None),
        ({VERSION_HINT: b"=v1"}, VersionConstraint("v1")),
        ({VERSION_HINT: b"= v1 "}, VersionConstraint("v1")),
        ({VERSION_HINT: b"==v1"}, VersionConstraint("=v1")),
        ({EPOCH_HINT: b"7"}, VersionConstraint(None, 7)),
        ({EPOCH_HINT: b"0"}, VersionConstraint(None, 0)),
        ({VERSION_HINT: b"=v1", EPOCH_HINT: b"007"}, VersionConstraint("v1", 7)),
    ],
)
def test_a_constraint_is_read_from_the_hints(hints, constraint):
    assert parse_version_constraint(hints) == constraint


@pytest.mark.parametrize(
    "hints",
    [
        {VERSION_HINT: b"v1"}, {VERSION_HINT: b""}, {VERSION_HINT: b"="}, {VERSION_HINT: b"=  "}, {VERSION_HINT: b">=v1"},
        {EPOCH_HINT: b""}, {EPOCH_HINT: b"-1"}, {EPOCH_HINT: b"1.5"}, {EPOCH_HINT: b"v1"}, {EPOCH_HINT: b"9" * 19},
        {EPOCH_HINT: b"\xb2"}, {VERSION_HINT: b"=v1", EPOCH_HINT: b"x"},
    ],
)  # fmt: skip
def test_an_invalid_constraint_is_refused(hints):
    with pytest.raises(HttpError) as caught:
        parse_version_constraint(hints)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    assert "x-omni-" in caught.value.message


@pytest.mark.parametrize(
    ("constraint", "version", "met"),
    [
        (VersionConstraint("v1"), WeightVersion("v1", 0), True),
        (VersionConstraint("v1"), WeightVersion("v2", 9), False),
        (VersionConstraint("v1"), UNKNOWN_VERSION, False),
        (VersionConstraint(None, 3), WeightVersion("v1", 3), True),
        (VersionConstraint(None, 3), WeightVersion(None, 4), True),
        (VersionConstraint(None, 3), WeightVersion("v1", 2), False),
        (VersionConstraint("v1", 3), WeightVersion("v1", 2), False),
        (VersionConstraint(), UNKNOWN_VERSION, True),
        (VersionConstraint("a%0Ab"), WeightVersion(ODD), True),  # as responses show it
    ],
)
def test_a_version_meets_a_constraint_or_not(constraint, version, met):
    assert constraint.is_met_by(version) is met


@given(
    st.builds(VersionConstraint, st.none() | LABELS, st.integers(0, 3)),
    st.builds(WeightVersion, st.none() | LABELS, st.integers(0, 3)),
)
def test_there_is_a_reason_exactly_when_the_constraint_is_not_met(constraint, version):
    assert (constraint.reason_against(version) == "") == constraint.is_met_by(version)


def test_the_reason_names_the_version_and_the_constraint():
    reason = VersionConstraint("v2", 7).reason_against(WeightVersion("v1", 3))
    assert reason == "has weights 'v1' (epoch 3), not 'v2' of epoch 7 or later"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", b'{"messages": []}'),
        ("POST", "/generate", b'{"text": "hi"}'),
        ("GET", "/v1/audio/voices", b""),
        ("POST", "/v1/audio/transcriptions", b""),
    ],
)
def test_every_kind_of_request_may_have_a_constraint(method, path, body):
    facts = RequestFacts(b"application/json", {VERSION_HINT: b"=v1"})
    assert inspect_request(
        match_route(method, path), body, facts
    ).version_constraint == VersionConstraint("v1")
