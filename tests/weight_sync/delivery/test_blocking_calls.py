import threading

import trio

from omni_proxy.weight_sync.delivery.blocking_calls import BlockingCalls


async def test_a_call_that_ends_another_does_not_wait_for_its_thread():
    threads, over = BlockingCalls("test", 1, max_ends=1), threading.Event()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.run, "wait", over.wait, 30)
            nursery.start_soon(threads.run, "wait too", over.wait, 30)
            await threads.end("stop", over.set)


async def test_a_cancelled_call_goes_on_in_its_thread():
    threads, over = BlockingCalls("test", 1, max_ends=1), threading.Event()
    with trio.fail_after(30):
        with trio.move_on_after(0.01) as given_up:
            await threads.run("wait", over.wait, 30)
        assert given_up.cancelled_caught
        assert await threads.end("name", lambda: threading.current_thread().name) == (
            "weights-test-name"
        )
    over.set()
