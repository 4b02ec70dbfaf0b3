"""Waiting for what another thread or process does."""

import queue
import threading


def run_within(secs, call):
    """What a call comes to in a thread of its own: one that hangs fails the test, not the tests."""
    outcome = queue.Queue()

    def run():
        try:
            outcome.put((call(), None))
        except Exception as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = outcome.get(timeout=secs)
    except queue.Empty:
        raise AssertionError(f"it hangs for {secs} s") from None
    if error is not None:
        raise error
    return result


def wait_until(true, secs=30.0):
    pause = threading.Event()
    for _ in range(int(secs / 0.01)):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError("it never came true")
