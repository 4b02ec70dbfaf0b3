"""Waiting until everything that a test started has ended, or waits for the test.

`wait_all_tasks_blocked` alone considers a task blocked while its thread writes a file, and its
`cushion` would have to be a guess about the disk.
"""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked


async def wait_until_idle() -> None:
    """Returns once all tasks are blocked, and none of them on a thread of the default limiter."""
    threads = trio.to_thread.current_default_thread_limiter()
    await wait_all_tasks_blocked()
    while threads.borrowed_tokens:
        await trio.sleep(0.001)
        await wait_all_tasks_blocked()
