"""Waiting for what another thread or process does."""

import threading


def until(true, secs=30.0):
    pause = threading.Event()
    for _ in range(int(secs / 0.01)):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError("it never came true")
