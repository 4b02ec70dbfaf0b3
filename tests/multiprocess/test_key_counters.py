import os

import pytest

from omni_proxy.api_keys.caller import IN_FLIGHT, REQUESTS, ApiCaller
from omni_proxy.api_keys.callers import UNKNOWN_SLOT
from omni_proxy.config.api_keys import CallerKey
from omni_proxy.multiprocess.shared_counters import KeyCounters, KeySlots

KEY = CallerKey(name="a", key_sha256="00" * 32, max_inflight=2, requests_per_minute=10)
NOW = 1000.0


@pytest.fixture
def counters():
    """Of the main process and of two others, all in this one."""
    main = KeyCounters.create()
    main.extend(2)
    others = [KeyCounters(main.descriptor, index) for index in (1, 2)]
    for other in others:
        other.highest = 2
    yield [main, *others]
    os.close(main.descriptor)


def test_processes_share_the_limits_of_a_caller(counters):
    callers = [ApiCaller(KEY, 1, each) for each in counters]
    assert [caller.begin(NOW) for caller in callers] == [None, None, "max_inflight"]
    assert {caller.in_flight for caller in callers} == {2}
    assert counters[0].totals(1)["requests"] == 2
    callers[0].end(0, 0, (3, 4), NOW)
    assert callers[2].begin(NOW) is None
    assert counters[0].totals(1)["input_tokens"] == 3


def test_what_a_process_had_in_flight_ends_with_it_and_its_rate_stays(counters):
    first, second = (ApiCaller(KEY, 1, each) for each in counters[1:])
    assert first.begin(NOW) is None
    assert first.begin(NOW) is None
    assert second.begin(NOW) == "max_inflight"
    counters[0].drop_in_flight(1, range(3))
    assert second.begin(NOW) is None
    again = ApiCaller(KEY, 1, counters[1])  # the process that replaces it
    assert again.requests.used(NOW) == 3


def test_a_name_keeps_its_slot_and_a_released_one_is_used_last(counters):
    slots = KeySlots()
    first = dict(slots.assign(["a", "b"], counters[0]))
    assert UNKNOWN_SLOT not in first.values()
    assert dict(slots.assign(["b", "c"], counters[0]))["b"] == first["b"]
    assert dict(slots.assign(["b", "c", "a"], counters[0]))["a"] != first["a"]


def test_a_slot_that_is_used_again_begins_at_zero_and_not_while_requests_are_in_flight(
    counters, monkeypatch
):
    monkeypatch.setattr("omni_proxy.multiprocess.shared_counters.KEY_SLOTS", 4)
    slots = KeySlots()
    busy, idle, other = (slots.assign(["a", "b", "c"], counters[0])[name] for name in "abc")
    counters[1].own(busy)[IN_FLIGHT] = 1
    counters[2].own(idle)[REQUESTS] = 5
    slots.assign(["c"], counters[0])
    assert slots.assign(["c", "d"], counters[0]) == {"c": other, "d": idle}
    assert counters[0].totals(idle)["requests"] == 0
