"""Counts of tries: against a dict of dicts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet import request_counters
from omni_proxy.fleet.request_counters import (
    CLASSES,
    FAILED,
    ROUTED,
    SUCCEEDED,
    none_yet,
    place_of,
    told,
)
from omni_proxy.routing.routes import match_route

NAMES = ("generation", "speech_http", "transcription")
STEPS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from([ROUTED, SUCCEEDED, FAILED])), max_size=30
)


@given(STEPS)
def test_each_class_has_its_own_counts(steps):
    counts, naive = none_yet(), Counter()
    for name, kind in steps:
        counts[place_of(name) + kind] += 1
        naive[name, kind] += 1
    for kind in (ROUTED, SUCCEEDED, FAILED):
        assert told(counts, kind) == {name: n for (name, of), n in naive.items() if of == kind}


def test_a_route_counts_where_its_class_has_its_place():
    route = match_route("POST", "/v1/audio/speech")
    assert (
        route.counter_index
        == place_of("speech_http")
        != match_route("POST", "/generate").counter_index
    )


def test_there_are_no_more_classes_than_places(monkeypatch):
    monkeypatch.setattr(request_counters, "_places", {})
    counts = none_yet()
    for number in range(CLASSES):
        counts[place_of(f"class {number}") + FAILED] += 1
    assert len(told(counts, FAILED)) == CLASSES
    with pytest.raises(AssertionError, match="one too many"):
        place_of("one too many")
