"""Counts of tries: against a dict of dicts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet import worker
from omni_proxy.fleet.worker import (
    CLASSES,
    FAILED,
    ROUTED,
    SUCCEEDED,
    counter_offset,
    counts_by_class,
    zero_counters,
)
from omni_proxy.routing.routes import match_route

NAMES = ("generation", "speech_http", "transcription")
STEPS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from([ROUTED, SUCCEEDED, FAILED])), max_size=30
)


@given(STEPS)
def test_each_class_has_its_own_counts(steps):
    counts, naive = zero_counters(), Counter()
    for name, kind in steps:
        counts[counter_offset(name) + kind] += 1
        naive[name, kind] += 1
    for kind in (ROUTED, SUCCEEDED, FAILED):
        assert counts_by_class(counts, kind) == {
            name: n for (name, of), n in naive.items() if of == kind
        }


def test_a_route_counts_where_its_class_has_its_place():
    route = match_route("POST", "/v1/audio/speech")
    assert (
        route.counter_index
        == counter_offset("speech_http")
        != match_route("POST", "/generate").counter_index
    )


def test_there_are_no_more_classes_than_places(monkeypatch):
    monkeypatch.setattr(worker, "_places", {})
    counts = zero_counters()
    for number in range(CLASSES):
        counts[counter_offset(f"class {number}") + FAILED] += 1
    assert len(counts_by_class(counts, FAILED)) == CLASSES
    with pytest.raises(AssertionError, match="one too many"):
        counter_offset("one too many")
