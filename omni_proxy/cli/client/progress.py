"""Questions that take their time: asked in a thread, while the person hears how far it is.

Invariant: Ctrl-C is obeyed at once, whatever the answer waits for; what was asked for goes on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from omni_proxy.cli.client.admin_client import AdminReply

POLL_SECS: Final = 0.5


def call_with_progress(ask: Callable[[], AdminReply], look: Callable[[], str]) -> AdminReply:
    """The answer of `ask`, with its exceptions; `look` says how far it is, "" where it can't."""
    future: Future[AdminReply] = Future()
    threading.Thread(target=_fill, args=(future, ask), name="asking", daemon=True).start()
    said = ""
    while True:
        try:
            return future.result(POLL_SECS)
        except TimeoutError:
            if future.done():  # the answer came just now, or it is a TimeoutError of `ask` itself
                return future.result()
        if (now := look()) and now != said:
            print(now, file=sys.stderr, flush=True)
            said = now


def _fill(future: Future[AdminReply], ask: Callable[[], AdminReply]) -> None:
    try:
        future.set_result(ask())
    except Exception as error:  # it is raised where the answer is waited for
        future.set_exception(error)


def confirm(question: str) -> bool:
    """Asks whoever sits there; only a plain yes is one."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
