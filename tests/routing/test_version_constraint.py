import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.weight_version import UNKNOWN, WeightVersion
from omni_proxy.routing.inspect.requirements import RequestFacts, inspect
from omni_proxy.routing.routes import match
from omni_proxy.routing.version_constraint import EPOCH, LABEL, VersionConstraint, wanted_by
from omni_proxy.wire.errors import HttpError

LABELS = st.sampled_from(["v1", "v2", "é", "a b"])
ODD = "a\nb"


@pytest.mark.parametrize(
    ("hints", "wanted"),
    [
        ({}, None),
        ({b"model": b"m"}, None),
        ({LABEL: b"=v1"}, VersionConstraint("v1")),
        ({LABEL: b"= v1 "}, VersionConstraint("v1")),
        ({LABEL: b"==v1"}, VersionConstraint("=v1")),
        ({EPOCH: b"7"}, VersionConstraint(None, 7)),
        ({EPOCH: b"0"}, VersionConstraint(None, 0)),
        ({LABEL: b"=v1", EPOCH: b"007"}, VersionConstraint("v1", 7)),
    ],
)
def test_conditions_are_read(hints, wanted):
    assert wanted_by(hints) == wanted


@pytest.mark.parametrize(
    "hints",
    [
        {LABEL: b"v1"}, {LABEL: b""}, {LABEL: b"="}, {LABEL: b"=  "}, {LABEL: b">=v1"},
        {EPOCH: b""}, {EPOCH: b"-1"}, {EPOCH: b"1.5"}, {EPOCH: b"v1"}, {EPOCH: b"9" * 19},
        {EPOCH: b"\xb2"}, {LABEL: b"=v1", EPOCH: b"x"},
    ],
)  # fmt: skip
def test_a_condition_that_can_not_be_read_is_refused(hints):
    with pytest.raises(HttpError) as caught:
        wanted_by(hints)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    assert "x-omni-" in caught.value.message


@pytest.mark.parametrize(
    ("wanted", "version", "met"),
    [
        (VersionConstraint("v1"), WeightVersion("v1", 0), True),
        (VersionConstraint("v1"), WeightVersion("v2", 9), False),
        (VersionConstraint("v1"), UNKNOWN, False),
        (VersionConstraint(None, 3), WeightVersion("v1", 3), True),
        (VersionConstraint(None, 3), WeightVersion(None, 4), True),
        (VersionConstraint(None, 3), WeightVersion("v1", 2), False),
        (VersionConstraint("v1", 3), WeightVersion("v1", 2), False),
        (VersionConstraint(), UNKNOWN, True),
        (VersionConstraint("a%0Ab"), WeightVersion(ODD), True),  # as answers show it
    ],
)
def test_weights_meet_a_condition_or_not(wanted, version, met):
    assert wanted.met_by(version) is met


@given(
    st.builds(VersionConstraint, st.none() | LABELS, st.integers(0, 3)),
    st.builds(WeightVersion, st.none() | LABELS, st.integers(0, 3)),
)
def test_there_is_a_word_against_weights_exactly_where_they_do_not_do(wanted, version):
    assert (wanted.against(version) == "") == wanted.met_by(version)


def test_the_word_names_both():
    against = VersionConstraint("v2", 7).against(WeightVersion("v1", 3))
    assert against == "has weights 'v1' (epoch 3), not 'v2' of epoch 7 or later"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", b'{"messages": []}'),
        ("POST", "/generate", b'{"text": "hi"}'),
        ("GET", "/v1/audio/voices", b""),
        ("POST", "/v1/audio/transcriptions", b""),
    ],
)
def test_every_kind_of_request_may_have_one(method, path, body):
    facts = RequestFacts(b"application/json", {LABEL: b"=v1"})
    assert inspect(match(method, path), body, facts).version == VersionConstraint("v1")
