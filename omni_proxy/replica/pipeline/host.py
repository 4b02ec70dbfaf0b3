"""Where a stage lives: a thread of this process. A host has one life after another.

Invariant: when `live` returns, every stage of the host has posted its `StageEnded`, unless it was
cancelled: a thread cannot be ended from outside, so it is told and left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import trio

from omni_proxy.replica.pipeline.config import StageConfig
from omni_proxy.replica.pipeline.messages import Emit, In, Shutdown
from omni_proxy.replica.pipeline.shell import inbox_of, run_stage


class Host(Protocol):
    """Holds some stages. `send` never blocks and may be called before the first life begins."""

    @property
    def stages(self) -> Sequence[str]: ...

    def send(self, stage: str, message: In) -> None: ...

    async def live(self, post: Emit) -> None:
        """Run the stages until all have ended; `post` may be called from any thread."""

    def shut(self) -> None:
        """Ask the stages to end; `live` returns soon."""


class ThreadHost:
    """One stage in a thread of its own."""

    def __init__(self, config: StageConfig) -> None:
        self.stages = (config.name,)
        self._config = config
        self._inbox = inbox_of(config.name)
        self._lived = False

    def send(self, stage: str, message: In) -> None:
        self._inbox.put(message)

    async def live(self, post: Emit) -> None:
        token = trio.lowlevel.current_trio_token()
        ended = trio.Event()
        if self._lived:
            self._inbox = inbox_of(
                self._config.name
            )  # what the last life left is of no use any more
        self._lived = True
        config, inbox = self._config, self._inbox

        def body() -> None:
            run_stage(config.name, config.factory, config.params, inbox, post)
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(ended.set)

        threading.Thread(target=body, name=config.name, daemon=True).start()
        try:
            await ended.wait()
        finally:
            inbox.put(Shutdown())

    def shut(self) -> None:
        self._inbox.put(Shutdown())
