"""What is texts of slow workers; who is slow at all: tests/cli/screen/test_diagnosis.py."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.admin_api.serializers.slow_workers import _median_without, slow_workers

AT = 1_800_000_000.0


def row(name, first_ms=100.0, *, there_secs=600.0, **fields):
    since = datetime.fromtimestamp(AT - there_secs, UTC).isoformat()
    return {
        "id": name, "model": "m", "role": "regular", "routable": True, "answers": 9, "rate": 1.0,
        "weight": 1, "first_p50_ms": first_ms, "state_since": since, "minute": {}, **fields,
    }  # fmt: skip


def texts(*rows):
    return {name: found.text for name, found in slow_workers(rows, AT).items()}


def test_a_worker_with_the_requests_of_the_others_has_a_slow_machine_or_engine():
    found = slow_workers([row("a"), row("b"), row("c", 400.0)], AT)
    assert (list(found), found["c"].times) == (["c"], 4.0)
    assert found["c"].text == (
        "first chunk after 400 ms, the others' after 100 ms; it gets no more requests than they do, "
        "so its machine or engine is slow"
    )


def test_requests_are_compared_by_weight_over_all_proxies_with_those_there_as_long():
    others = [row("a", weight=2, rate=2.0), row("b")]
    more = row("c", 400.0, elsewhere={"requests_per_sec": 2.0})
    assert "it gets 3.0 requests/s, the others 1.0" in texts(*others, more)["c"]
    new = [row(name, there_secs=20) for name in "ab"]
    assert "have not served for as long" in texts(*new, row("c", 400.0, rate=9.0))["c"]


def test_an_engine_that_queues_or_is_full_and_a_cold_cache_are_causes():
    cached = [row(name, minute={"cache_hit_ratio": 0.8}) for name in "ab"]
    load = {"waiting": 12, "kv_usage": 0.97}
    text = texts(*cached, row("c", 400.0, engine_load=load, minute={"cache_hit_ratio": 0.1}))["c"]
    assert text.endswith(
        "; 12 wait in its engine; its KV cache is 97% full; 10% of its prompts are cached, of the "
        "others' 80%"
    )


def test_the_time_between_chunks_is_compared_within_a_role():
    rows = [row(name, minute={"between_p50_ms": gap}) for name, gap in (("a", 5.0), ("b", 875.0))]
    assert texts(*rows)["b"].startswith("875 ms between two chunks, the others' 5.0 ms; ")
    rows[0]["role"] = "prefill"
    assert texts(*rows) == {}


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30), st.data())
def test_the_median_of_the_others_is_that_of_a_list_without_it(times, data):
    times.sort()
    at = data.draw(st.integers(0, len(times) - 1))
    others = times[:at] + times[at + 1 :]
    below = sum(each <= _median_without(times, at) for each in others)
    above = sum(each >= _median_without(times, at) for each in others)
    assert min(below, above) * 2 >= len(others)
