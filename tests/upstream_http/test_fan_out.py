import pytest
import trio

from omni_proxy.upstream_http.fan_out import call_each


async def test_results_are_in_the_order_of_the_items(autojump_clock):
    async def call(secs):
        await trio.sleep(secs)
        return secs

    assert await call_each([3, 1, 3, 2], call) == [3, 1, 3, 2]
    assert trio.current_time() == pytest.approx(3)  # concurrently
    assert await call_each([], call) == []


async def test_no_more_calls_than_allowed_run_at_a_time(autojump_clock):
    running, most = 0, 0

    async def call(_):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1)
        running -= 1

    await call_each(range(5), call, max_parallel=2)
    assert most == 2


async def test_an_exception_of_a_call_cancels_the_others(autojump_clock):
    async def call(fails):
        if fails:
            raise ValueError("no")
        await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await call_each([False, True], call)
    assert caught.group_contains(ValueError, match="no")
