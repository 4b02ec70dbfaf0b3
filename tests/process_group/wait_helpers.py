"""Waits for other threads and processes."""

import queue
import threading


def run_within(secs, call):
    """Runs a call in a thread, so that a call that hangs fails only its own test."""
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
        raise AssertionError(f"the call did not return within {secs} s") from None
    if error is not None:
        raise error
    return result


def wait_until(condition, secs=30.0):
    pause = threading.Event()
    for _ in range(int(secs / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"the condition was not true within {secs} s")
