"""The modelled engine, compared with a naive one that runs each step."""

from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.simulate.engine import CHUNK_TOKENS, Engine, EngineSpec
from omni_proxy.simulate.workload import Request

SPEC = EngineSpec(
    prefill_tokens_per_sec=1000, decode_step_ms=10, decode_step_ms_per_request=1, max_batch=3
)


class Record:
    def __init__(self, driver):
        self.driver = driver
        self.first = self.end = self.error = None

    def on_first_token(self):
        self.first = self.driver.now

    def on_completed(self, cached_tokens):
        self.end = self.driver.now

    def on_failed(self, error, *, refused=False):
        self.error = ("refused " if refused else "") + error


class Driver:
    """Virtual time and events for one engine."""

    def __init__(self, spec):
        self.now, self.events, self.count = 0.0, [], 0
        self.engine = Engine(spec, self.schedule)

    def schedule(self, at, callback, argument):
        self.count += 1
        heappush(self.events, (max(at, self.now), self.count, callback, argument))

    def submit_at(self, at, request):
        record = Record(self)
        self.schedule(at, lambda _: self.engine.submit(request, record, self.now), None)
        return record

    def run(self, until=float("inf")):
        while self.events and self.events[0][0] <= until:
            self.now, _, callback, argument = heappop(self.events)
            callback(argument)


class NaiveEngine:
    """The same rules step by step, with lists; without a KV limit and without a cache."""

    def __init__(self, spec, requests):
        self.spec, self.remaining = spec, sorted(requests, key=lambda item: item[0])
        self.times = {}

    def run(self):
        now, waiting, prefilling, decoding = 0.0, [], [], []
        while self.remaining or waiting or prefilling or decoding:
            if not (waiting or prefilling or decoding):
                now = max(now, self.remaining[0][0])
            while self.remaining and self.remaining[0][0] <= now + 1e-9:
                waiting.append(self.remaining.pop(0)[1])
            while waiting and len(prefilling) + len(decoding) < self.spec.max_batch:
                request = waiting.pop(0)
                prefilling.append([request, request.input_tokens])
            chunk = min(CHUNK_TOKENS, sum(remaining for _, remaining in prefilling))
            now += chunk / self.spec.prefill_tokens_per_sec
            if decoding:
                now += self.spec.decode_step_ms / 1000
                now += self.spec.decode_step_ms_per_request * len(decoding) / 1000
            for entry in decoding:
                entry[1] -= 1
            while chunk:
                part = min(chunk, prefilling[0][1])
                prefilling[0][1] -= part
                chunk -= part
                if not prefilling[0][1]:
                    request = prefilling.pop(0)[0]
                    self.times[id(request)] = [now, None]
                    decoding.append([request, request.output_tokens - 1])
            for entry in [entry for entry in decoding if entry[1] <= 0]:
                decoding.remove(entry)
                self.times[id(entry[0])][1] = now
        return self.times


# Arrivals differ from each other and from the ends of steps: equal times have no defined order.
ARRIVALS = st.integers(0, 200).map(lambda tenths: tenths / 10 + 0.0003)


@given(
    st.lists(
        st.tuples(ARRIVALS, st.integers(1, 5000), st.integers(1, 40)),
        max_size=12,
        unique_by=lambda entry: entry[0],
    )
)
def test_times_equal_those_of_an_engine_that_runs_each_step(entries):
    requests = [(at, Request(at, prompt, answer)) for at, prompt, answer in entries]
    driver = Driver(SPEC)
    records = [(driver.submit_at(at, request), request) for at, request in requests]
    driver.run()
    expected = NaiveEngine(SPEC, requests).run()
    for record, request in records:
        assert [record.first, record.end] == pytest.approx(expected[id(request)], abs=1e-6)


def chain(*blocks, output=4, tokens=None):
    return Request(0.0, tokens or 100 * len(blocks), output, blocks, 100)


@given(
    st.lists(
        st.tuples(
            ARRIVALS,
            st.lists(st.integers(1, 4), min_size=1, max_size=5),
            st.integers(1, 99),
            st.integers(1, 30),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_kv_memory_is_never_leaked_or_counted_twice(entries):
    """Prompts are paths in a tree, so that many share their leading blocks."""
    driver = Driver(EngineSpec(kv_tokens=800, max_batch=3, prefill_tokens_per_sec=1000))
    engine, records = driver.engine, []
    for at, path, rest, output, cancelled in entries:
        blocks = tuple(int("".join(map(str, path[: end + 1]))) for end in range(len(path)))
        request = Request(at, 100 * (len(path) - 1) + rest, output, blocks, 100)
        record = driver.submit_at(at, request)
        records.append(record)
        if cancelled:
            driver.schedule(at + 0.2, lambda _, record=record: engine.cancel(record), None)
    while driver.events:
        driver.run(until=driver.events[0][0])
        assert 0 <= engine.load.kv_usage <= 1
        assert sum(engine.cached_blocks.values()) <= 800
    assert not engine.in_flight
    assert engine.load.kv_usage == 0
    check_all_memory_is_free(driver, blocks=(8,))  # by eviction
    engine.evict()
    assert not engine.cached_blocks
    check_all_memory_is_free(driver, blocks=())


@pytest.mark.parametrize(
    "count", [2, 50], ids=["at the same time", "after the other one has ended"]
)
def test_blocks_that_two_requests_compute_are_counted_once(count):
    driver = Driver(EngineSpec(kv_tokens=10_000, prefill_tokens_per_sec=1000))
    driver.submit_at(0.0, Request(0.0, 1000, 1))  # the next step begins when it is computed
    driver.submit_at(0.5, chain(0, output=1))
    driver.submit_at(0.5, chain(*range(count), output=1))
    driver.run()
    assert (driver.engine.found_blocks, driver.engine.load.kv_usage) == (0, 0)
    driver.engine.evict()
    check_all_memory_is_free(driver, blocks=())


def check_all_memory_is_free(driver, blocks):
    """A request that needs all of it starts at once."""
    at, tokens = driver.now + 1, driver.engine.spec.kv_tokens - 1
    record = driver.submit_at(at, Request(at, tokens, 1, blocks, tokens))
    driver.run(until=at)
    assert driver.engine.load == (0, 1)
    driver.run()
    assert record.error is None


def test_leading_blocks_of_an_earlier_prompt_are_not_computed_again():
    driver = Driver(SPEC)
    first = driver.submit_at(0.0, chain(1, 2, 3))
    second = driver.submit_at(10.0, chain(1, 2, 9))
    driver.run()
    assert first.first == pytest.approx(0.3)
    assert second.first == pytest.approx(10.1)
    assert (driver.engine.found_blocks, driver.engine.seen_blocks) == (2, 6)


def test_a_block_after_a_different_block_is_not_reused():
    driver = Driver(SPEC)
    driver.submit_at(0.0, chain(1, 2))
    driver.submit_at(10.0, chain(7, 2))
    driver.run()
    assert driver.engine.found_blocks == 0


def test_one_token_of_a_fully_cached_prompt_is_computed():
    driver = Driver(SPEC)
    driver.submit_at(0.0, chain(1, 2))
    again = driver.submit_at(10.0, chain(1, 2))
    driver.run()
    assert again.first == pytest.approx(10.001)


def test_the_least_recently_used_blocks_are_evicted_first():
    driver = Driver(EngineSpec(kv_tokens=400, prefill_tokens_per_sec=1000))
    for at, block in enumerate((1, 2, 3, 1, 4)):  # 4 evicts 2
        driver.submit_at(float(at), chain(block))
    driver.run()
    hits = driver.engine.found_blocks
    driver.submit_at(20.0, chain(1))
    driver.submit_at(21.0, chain(3))
    driver.run()
    assert driver.engine.found_blocks == hits + 2
    driver.submit_at(30.0, chain(2))
    driver.run()
    assert driver.engine.found_blocks == hits + 2


def test_a_request_waits_until_the_kv_memory_has_room():
    driver = Driver(EngineSpec(kv_tokens=150, prefill_tokens_per_sec=1000))
    first = driver.submit_at(0.0, Request(0.0, 100, 20))
    second = driver.submit_at(0.0, Request(0.0, 100, 20))
    driver.run()
    assert second.first == pytest.approx(first.end + 0.1)


def test_a_request_beyond_the_kv_memory_is_refused():
    driver = Driver(EngineSpec(kv_tokens=100))
    record = driver.submit_at(0.0, Request(0.0, 100, 1))
    driver.run()
    assert record.error == "refused the request is longer than the KV memory"


def test_a_worker_that_dies_fails_every_request_and_loses_its_cache():
    driver = Driver(SPEC)
    completed = driver.submit_at(0.0, chain(1, 2))
    running = [driver.submit_at(5.0, Request(5.0, 100, 1000)) for _ in range(5)]
    driver.run(until=6.0)
    driver.engine.die()
    driver.run()
    assert completed.end is not None
    assert [record.error for record in running] == ["the worker died"] * 5
    assert not driver.engine.alive
    assert driver.engine.in_flight == 0


def test_a_slow_worker_takes_longer_by_its_factor():
    driver = Driver(SPEC)
    driver.engine.factor = 3.0
    record = driver.submit_at(0.0, Request(0.0, 1000, 11))
    driver.run()
    assert record.first == pytest.approx(3.0)
    assert record.end == pytest.approx(3.0 + 10 * 3 * 0.011)


def test_every_prompt_has_its_overhead_once():
    spec = EngineSpec(
        prefill_tokens_per_sec=1000, prefill_overhead_ms=50, decode_step_ms=0,
        decode_step_ms_per_request=0,
    )  # fmt: skip
    driver = Driver(spec)
    long = driver.submit_at(0.0, Request(0.0, 2 * CHUNK_TOKENS, 1))
    cached = driver.submit_at(9.0, chain(1, 2))
    again = driver.submit_at(19.0, chain(1, 2, 3))
    driver.run()
    assert long.first == pytest.approx(2 * CHUNK_TOKENS / 1000 + 0.05)
    assert cached.first == pytest.approx(9.25)
    assert again.first == pytest.approx(19.15)


def test_the_load_is_the_number_of_waiting_requests_and_the_kv_usage():
    driver = Driver(EngineSpec(prefill_tokens_per_sec=1000, max_batch=3, kv_tokens=20_000))
    assert driver.engine.load == (0.0, 0.0)
    for _ in range(4):
        driver.submit_at(0.0, Request(0.0, 3000, 1000))
    driver.run(until=0.1)
    assert driver.engine.load == (3.0, pytest.approx(4000 / 20_000))
    driver.run()
    assert driver.engine.load == (0.0, 0.0)
