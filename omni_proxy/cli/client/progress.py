"""Slow requests to the proxy, sent in a thread while their progress is printed.

Invariant: Ctrl-C ends the command at once; the operation in the proxy continues.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from omni_proxy.cli.client.admin_client import AdminReply

POLL_SECS: Final = 0.5


def call_with_progress(call: Callable[[], AdminReply], describe: Callable[[], str]) -> AdminReply:
    """The result of `call`, with its exceptions; `describe` returns the progress or ""."""
    future: Future[AdminReply] = Future()
    threading.Thread(target=_fill, args=(future, call), name="admin-request", daemon=True).start()
    printed = ""
    while True:
        try:
            return future.result(POLL_SECS)
        except TimeoutError:
            if future.done():  # the reply came just now, or it is a TimeoutError of `call` itself
                return future.result()
        if (now := describe()) and now != printed:
            print(now, file=sys.stderr, flush=True)
            printed = now


def _fill(future: Future[AdminReply], call: Callable[[], AdminReply]) -> None:
    try:
        future.set_result(call())
    except Exception as error:  # raised again where the result is awaited
        future.set_exception(error)


def confirm(question: str) -> bool:
    """Ask on the terminal; only `y` and `yes` confirm."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
