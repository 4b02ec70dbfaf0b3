import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.api_keys.caller_limits import IN_FLIGHT, REQUESTS, ApiCaller
from omni_proxy.api_keys.caller_lookup import UNKNOWN_SLOT
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.multiprocess.shared_keys import (
    PAUSE_SECS,
    KeyCounters,
    KeySlots,
    RecentRefusals,
    WrongKeyReport,
)
from omni_proxy.routing.inspect.response_usage import count_tokens

KEY = CallerKey(name="a", key_sha256="00" * 32, max_inflight=2, requests_per_minute=10)
OPEN = CallerKey(name="a", key_sha256="00" * 32)
NOW = 1000.0


def no_tokens(ended):
    return 0, 0


@pytest.fixture
def counters():
    """The counters of a main process and of two others, all in this process."""
    main = KeyCounters.create()
    main.extend(2)
    others = [KeyCounters(main.descriptor, index) for index in (1, 2)]
    for other in others:
        other.highest = 2
    yield [main, *others]
    os.close(main.descriptor)


def test_processes_share_the_limits_of_a_caller(counters):
    callers = [ApiCaller(KEY, 1, each, no_tokens) for each in counters]
    assert [caller.begin(NOW) for caller in callers] == [None, None, "max_inflight"]
    assert {caller.in_flight for caller in callers} == {2}
    callers[0].end(0, 0, 3, 4, NOW)
    assert callers[2].begin(NOW) is None
    totals = counters[0].totals(1)
    assert (totals["requests"], totals["input_tokens"], totals["in_flight"]) == (1, 3, 2)


@pytest.mark.parametrize("count", [10**10 - 1, 10**10, 2**53])
def test_no_count_of_a_response_makes_the_counters_overflow(counters, count):
    """A count of more than ten digits counts as missing."""
    caller = ApiCaller(OPEN, 1, counters[0], count_tokens)
    response = b'{"usage": {"prompt_tokens": %d, "completion_tokens": 1}}' % count
    for _ in range(2000):
        assert caller.begin(NOW) is None
        caller.uncounted.append((response, 16, 200))
        caller.publish()
    total = counters[0].totals(1)["input_tokens"]
    assert total == 2000 * (count if count < 10**10 else 0)


def test_counts_without_a_limit_are_shared_when_they_are_published(counters):
    callers = [ApiCaller(OPEN, 1, each, no_tokens) for each in counters]
    for caller in callers:
        assert caller.begin(NOW) is None
    callers[0].end(0, 0, 3, 4, NOW)
    assert not any(counters[0].totals(1).values())
    for _ in range(2):
        for caller in callers:
            caller.publish()
    totals = counters[0].totals(1)
    assert (totals["requests"], totals["output_tokens"], totals["in_flight"]) == (1, 4, 2)


def test_a_later_limit_includes_requests_already_in_flight(counters):
    callers = [ApiCaller(OPEN, 1, each, no_tokens) for each in counters]
    for caller in callers[:2]:
        assert caller.begin(NOW) is None
    for caller, rows in zip(callers, counters, strict=True):
        caller.configure(KEY, rows)
    assert {caller.begin(NOW) for caller in callers} == {"max_inflight"}


def test_requests_of_a_removed_key_end_in_its_cells(counters):
    caller = ApiCaller(OPEN, 1, counters[1], no_tokens)
    assert caller.begin(NOW) is None
    caller.retire()
    assert counters[0].in_flight(1) == 1
    assert not caller.defers_counts
    caller.end(0, 0, 3, 4, NOW)
    assert counters[0].in_flight(1) == 0


def test_in_flight_counts_of_a_dead_process_are_dropped_but_not_its_rates(counters):
    first, second = (ApiCaller(KEY, 1, each, no_tokens) for each in counters[1:])
    assert first.begin(NOW) is None
    assert first.begin(NOW) is None
    assert second.begin(NOW) == "max_inflight"
    counters[0].drop_in_flight(1, range(3))
    assert second.begin(NOW) is None
    again = ApiCaller(KEY, 1, counters[1], no_tokens)  # the process that replaces it
    requests, _ = again.rate_rows(NOW)
    assert sum(count for _, count in requests) == 3


def test_a_key_keeps_its_slot_and_a_released_slot_is_reused_last(counters):
    slots = KeySlots()
    first = dict(slots.assign(["a", "b"], counters[0]))
    assert UNKNOWN_SLOT not in first.values()
    assert dict(slots.assign(["b", "c"], counters[0]))["b"] == first["b"]
    assert dict(slots.assign(["b", "c", "a"], counters[0]))["a"] != first["a"]


def test_a_slot_is_reused_from_zero_and_only_without_requests_in_flight(counters, monkeypatch):
    monkeypatch.setattr("omni_proxy.multiprocess.shared_keys.KEY_SLOTS", 4)
    slots = KeySlots()
    busy, idle, other = (slots.assign(["a", "b", "c"], counters[0])[name] for name in "abc")
    counters[1].own(busy)[IN_FLIGHT] = 1
    counters[2].own(idle)[REQUESTS] = 5
    slots.assign(["c"], counters[0])
    assert slots.assign(["c", "d"], counters[0]) == {"c": other, "d": idle}
    assert counters[0].totals(idle)["requests"] == 0


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 5)), max_size=40))
def test_each_refused_request_is_in_one_line_and_lines_are_a_minute_apart(steps):
    report, now, refused, lines = WrongKeyReport(), 0.0, 0, []
    for pause, new in steps:
        now, refused = now + pause, refused + new
        if count := report.due(refused, now):
            lines.append((now, count))
    assert all(later[0] - before[0] >= PAUSE_SECS for before, later in pairwise(lines))
    last = report.due(refused, now + PAUSE_SECS)
    assert sum(count for _, count in lines) + last == refused


def test_refusals_of_the_last_minute_are_counted():
    recent = RecentRefusals()
    assert recent.count(3) == 3  # before the first note
    for now, refused in ((10.0, 3), (11.0, 7), (40.0, 7), (70.0, 9)):
        recent.note(refused, now)
    assert (recent.count(9), recent.count(12)) == (6, 9)
    recent.note(12, 500.0)
    recent.note(12, 560.0)
    assert recent.count(12) == 0
