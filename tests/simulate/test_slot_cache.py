"""The cache of llama.cpp's server: the text in each slot, and the store of earlier texts."""

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.simulate.engine import EngineSpec, Job
from omni_proxy.simulate.slot_cache import SlotCache
from omni_proxy.simulate.workload import Request
from tests.simulate.test_engine import Driver

BLOCK = 100


def job(*blocks, tokens=None, output=10):
    size = tokens or BLOCK * len(blocks)
    return Job(Request(0.0, size, output, blocks, BLOCK), listener=None)


def serve(cache, *blocks, **sizes):
    """Runs a request from admission to end; returns the number of tokens that it reused."""
    request_job = job(*blocks, **sizes)
    assert cache.admit(request_job)
    cache.publish(request_job)
    cache.release(request_job)
    return request_job.cached_tokens


def test_the_next_turn_of_a_chat_reuses_its_text():
    cache = SlotCache(2, 0)
    assert serve(cache, 1, 2, 3) == 0
    assert serve(cache, 1, 2, 3, 4) == 300
    assert serve(cache, 1, 2, 3, 4) == 399  # the last token is always computed


def test_a_slot_with_a_common_prefix_is_reused_and_loses_the_rest():
    cache = SlotCache(2, 0)
    serve(cache, 1, 2, 3)
    assert serve(cache, 1, 2, 9) == 200
    assert serve(cache, 1, 2, 3, 4) == 200


def test_a_text_that_would_mostly_be_lost_is_stored_and_found_again():
    cache = SlotCache(1, 0)
    serve(cache, 1, 2, 3, 4, 5, 6)
    assert serve(cache, 1, 9) == 100
    assert serve(cache, 1, 2, 3, 4, 5, 6, 7) == 600


def test_a_text_without_a_common_prefix_takes_the_least_recently_used_slot():
    cache = SlotCache(2, 0)
    serve(cache, 1, 2)
    serve(cache, 3, 4)
    serve(cache, 5, 6)  # replaces the first, which is stored
    assert serve(cache, 3, 4, 7) == 200
    assert serve(cache, 1, 2, 7) == 200


def test_a_slot_with_a_tenth_in_common_is_not_preferred():
    cache = SlotCache(2, 0)
    serve(cache, *range(10))
    assert serve(cache, 0, *range(20, 29)) == 0
    assert serve(cache, *range(10), 30) == 1000


def test_the_store_is_bounded_and_evicts_the_oldest():
    cache = SlotCache(1, 500)
    for text in (1, 2, 3, 4):
        serve(cache, text, text + 10)
    assert serve(cache, 3, 13, 5) == 200
    assert serve(cache, 1, 11, 5) == 0


def test_every_slot_computes_one_request_at_a_time():
    cache = SlotCache(2, 0)
    first, second, third = job(1), job(2), job(3)
    assert cache.admit(first)
    assert cache.admit(second)
    assert not cache.admit(third)
    cache.release(first)  # cancelled before its prompt was computed: none of it is kept
    assert cache.admit(third)
    assert third.cached_tokens == 0
    cache.publish(third)
    cache.release(third)
    assert serve(cache, 1) == 0


def test_clearing_keeps_texts_in_use():
    cache = SlotCache(2, 0)
    serve(cache, 1, 2)
    using = job(3, 4)
    cache.admit(using)
    cache.publish(using)
    cache.clear()
    cache.release(using)
    assert serve(cache, 1, 2, 5) == 0
    assert serve(cache, 3, 4, 5) == 200


paths = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(
    lambda path: tuple(int("".join(map(str, path[: end + 1]))) for end in range(len(path)))
)


@given(st.lists(st.tuples(paths, st.integers(1, BLOCK)), max_size=20), st.integers(1, 3))
def test_no_more_is_reused_than_an_earlier_prompt_has_in_common(entries, slots):
    cache = SlotCache(slots, 0)
    earlier = []
    for blocks, rest in entries:
        tokens = BLOCK * (len(blocks) - 1) + rest
        reused = serve(cache, *blocks, tokens=tokens)
        possible = max((shared(blocks, other) for other in earlier), default=0)
        assert reused <= min(BLOCK * possible, tokens - 1)
        earlier.append(blocks)


def shared(one, other):
    return len({*one} & {*other})  # the number of a block encodes its whole path


def test_an_engine_computes_one_request_per_slot_at_a_time():
    driver = Driver(EngineSpec(prefill_tokens_per_sec=1000, decode_step_ms=10, slots=1))
    first = driver.submit_at(0.0, Request(0.0, 100, 5, (1,), 100))
    second = driver.submit_at(0.0, Request(0.0, 100, 5, (2,), 100))
    again = driver.submit_at(9.0, Request(0.0, 200, 5, (2, 3), 100))
    driver.run()
    assert second.first > first.end
    assert again.first - 9.0 < 0.11
    assert driver.engine.found_blocks == 1
