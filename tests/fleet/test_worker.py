"""Workers: rotation, specifications and request counters."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.worker import (
    FAILED,
    ROUTED,
    SUCCEEDED,
    counter_offset,
    counts_by_class,
    zero_counters,
)
from omni_proxy.routing.routes import match_route
from tests.fleet.entries import entry, fleet_of

NAMES = ("generation", "speech_http", "transcription")
STEPS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from([ROUTED, SUCCEEDED, FAILED])), max_size=30
)


@pytest.fixture
def worker():
    (only,) = fleet_of(entry("a")).workers
    return only


def test_a_worker_is_routable_while_healthy_enabled_and_not_cordoned(worker):
    assert worker.routable
    worker.cordon_reasons.add("updating")
    assert not worker.routable
    worker.cordon_reasons.clear()
    worker.configure(entry("a", disabled=True))
    assert not worker.routable


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m"},
        {"capabilities": frozenset({"chat"})},
        {"disabled": True},
        {"weight": 2},
        {"max_inflight": 3},
        {"origin": "api"},
        {"api_key_env": "KEY"},
    ],
)
def test_a_spec_that_differs_in_any_field_does_not_match(worker, change):
    assert worker.matches(entry("a"))
    assert not worker.matches(entry("a", **change))
    worker.configure(entry("a", **change))
    assert worker.matches(entry("a", **change))


@given(STEPS)
def test_each_class_has_its_own_counters(steps):
    counts, expected = zero_counters(), Counter()
    for name, kind in steps:
        counts[counter_offset(name) + kind] += 1
        expected[name, kind] += 1
    for kind in (ROUTED, SUCCEEDED, FAILED):
        assert counts_by_class(counts, kind) == {
            name: n for (name, other), n in expected.items() if other == kind
        }


def test_a_route_counts_at_the_offset_of_its_class():
    route = match_route("POST", "/v1/audio/speech")
    assert (
        route.counter_index
        == counter_offset("speech_http")
        != match_route("POST", "/generate").counter_index
    )


MANY_CLASSES = """
from omni_proxy.fleet.worker import CLASSES, FAILED, counter_offset, counts_by_class, zero_counters

counts = zero_counters()
for number in range(CLASSES):
    counts[counter_offset(f"class {number}") + FAILED] += 1
print(len(counts_by_class(counts, FAILED)) == CLASSES)
counter_offset("one too many")
"""


def test_the_number_of_classes_is_bounded():
    """In a process of its own, because a process forgets no class."""
    run = subprocess.run(
        [sys.executable, "-c", MANY_CLASSES], capture_output=True, text=True, check=False
    )
    assert run.stdout == "True\n"
    assert "AssertionError: too many traffic classes: one too many" in run.stderr
