"""One asyncio loop in one thread, beside trio's: gRPC's servers run there.

Invariant: all servers of a process are in the same loop. gRPC has one queue of events for all
loops, and loses some of them where one of its loops is closed while others run.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  grpc's server runs on asyncio
from collections.abc import Coroutine

import trio


class AsyncioThread:
    """`run` it, then `call`; `stop` once nothing is called any more."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._loop = asyncio.new_event_loop()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until `stop`: cancelling does not end it, for what runs in it must end first."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, self._main)
                task_status.started()

    def _main(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def call(self, task: Coroutine[object, object, None]) -> None:
        """Until it has ended; cancelling does not end it. Raises what it raises."""
        ended = trio.Event()
        future = asyncio.run_coroutine_threadsafe(task, self._loop)
        future.add_done_callback(lambda _: self._token.run_sync_soon(ended.set))
        with trio.CancelScope(shield=True):
            await ended.wait()
        future.result()
