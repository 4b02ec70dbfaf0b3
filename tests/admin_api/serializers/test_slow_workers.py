"""The texts about slow workers; tests/cli/screen/test_diagnosis.py tests which workers are slow."""

from datetime import UTC, datetime
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.admin_api.serializers.slow_workers import SLOW_FACTOR, SLOW_MS, slow_workers

AT = 1_800_000_000.0


def row(name, first_ms=100.0, *, age_secs=600.0, **fields):
    since = datetime.fromtimestamp(AT - age_secs, UTC).isoformat()
    return {
        "id": name, "model": "m", "role": "regular", "routable": True, "answers": 9, "rate": 1.0,
        "weight": 1, "first_p50_ms": first_ms, "state_since": since, "minute": {}, **fields,
    }  # fmt: skip


def texts(*rows):
    return {name: slow.text for name, slow in slow_workers(rows, AT).items()}


def test_with_an_equal_request_rate_the_machine_or_engine_is_slow():
    slow = slow_workers([row("a"), row("b"), row("c", 400.0)], AT)
    assert (list(slow), slow["c"].times) == (["c"], 4.0)
    assert slow["c"].text == (
        "first chunk after 400 ms, the others' after 100 ms; it gets no more requests than they do, "
        "so its machine or engine is slow"
    )


def test_request_rates_are_compared_by_weight_with_workers_of_the_same_age():
    others = [row("a", weight=2, rate=2.0), row("b")]
    busier = row("c", 400.0, elsewhere={"requests_per_sec": 2.0})
    assert "it gets 3.0 requests/s, the others 1.0" in texts(*others, busier)["c"]
    new = [row(name, age_secs=20) for name in "ab"]
    assert "have not served for as long" in texts(*new, row("c", 400.0, rate=9.0))["c"]


def test_a_queue_a_full_kv_cache_and_few_cache_hits_are_causes():
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


@given(st.lists(st.integers(1, 3000) | st.sampled_from([100, 9000]), min_size=2, max_size=9))
def test_a_time_is_compared_with_the_median_of_the_other_workers(times):
    slow = slow_workers([row(str(number), own) for number, own in enumerate(times)], AT)
    medians = [median(times[:at] + times[at + 1 :]) for at in range(len(times))]
    assert {worker_id: found.times for worker_id, found in slow.items()} == {
        str(number): round(own / others, 1)
        for number, (own, others) in enumerate(zip(times, medians, strict=True))
        if own >= SLOW_FACTOR * others and own - others >= SLOW_MS
    }
