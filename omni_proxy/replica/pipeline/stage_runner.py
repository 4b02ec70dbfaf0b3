"""Runs a stage in a thread: its factory, its scheduler, and the messages about both.

Invariant: the last message of a stage is `StageEnded`, however it ended; after the factory has
returned there is one `StageReady` before it. When `live` returns, every stage of the host has
posted its `StageEnded`, unless it was cancelled: a thread cannot be ended from outside.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import trio

from omni_proxy.replica.pipeline.config import StageConfig, import_dotted
from omni_proxy.replica.pipeline.messages import Emit, Shutdown, StageEnded, StageInput, StageReady
from omni_proxy.replica.pipeline.stage import Scheduler
from omni_proxy.replica.profiling.recorder import STAGE_EVENTS, InstrumentedEmit, InstrumentedInbox

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

Inbox = queue.SimpleQueue[StageInput]


def make_inbox(stage: str) -> Inbox:
    """Return the stage's inbox, which consumes the profiler's messages."""
    return InstrumentedInbox(stage)


def run_stage(name: str, factory: str, params: Mapping[str, Any], inbox: Inbox, emit: Emit) -> None:
    """Create the scheduler and run it until `Shutdown`; blocks, in the stage's thread."""
    error = ""
    try:
        scheduler: Scheduler = import_dotted(factory)(name, **params)
        if hasattr(scheduler, "record"):
            scheduler.record = partial(_record, name)
        info = {"supports_admin": scheduler.supports_admin, **getattr(scheduler, "info", {})}
        emit(StageReady(name, info))
        scheduler.run(inbox, InstrumentedEmit(name, emit))
    except ModuleNotFoundError as raised:
        error = missing_package_message(raised)
    except Exception as raised:  # stages are user code: only this stage ends, with its reason
        log.exception("stage_crashed stage=%s", name)
        error = f"{type(raised).__name__}: {raised}"
    emit(StageEnded(name, error))


def _record(stage: str, event: str, request_id: str, seen: dict[str, Any]) -> None:
    STAGE_EVENTS.record(event, request_id, stage, seen)


def missing_package_message(fault: ModuleNotFoundError) -> str:
    """Which module is missing, and how to install it if it belongs to the package."""
    name = (fault.name or "").partition(".")[0]
    if name in ("", "omni_proxy"):
        return str(fault)
    return f"the package {name} is not installed: pip install 'omni-proxy[replica]'"


# Where a stage lives: a thread of this process. A host has one life after another.
#
# Invariant: when `live` returns, every stage of the host has posted its `StageEnded`, unless it was
# cancelled: a thread cannot be ended from outside, so it is told and left behind.


class StageHost(Protocol):
    """Runs some stages. `send` never blocks and may be called before the first run."""

    @property
    def stages(self) -> Sequence[str]: ...

    def send(self, stage: str, message: StageInput) -> None: ...

    async def live(self, post: Emit) -> None:
        """Run the stages until all have ended; `post` may be called from any thread."""

    def shut(self) -> None:
        """Ask the stages to end; `live` returns soon."""


class StageThread:
    """One stage in its own thread."""

    def __init__(self, config: StageConfig) -> None:
        self.stages = (config.name,)
        self._config = config
        self._inbox = make_inbox(config.name)
        self._has_run = False

    def send(self, stage: str, message: StageInput) -> None:
        self._inbox.put(message)

    async def live(self, post: Emit) -> None:
        token = trio.lowlevel.current_trio_token()
        ended = trio.Event()
        if self._has_run:
            self._inbox = make_inbox(
                self._config.name
            )  # what the last life left is of no use any more
        self._has_run = True
        config, inbox = self._config, self._inbox

        def run() -> None:
            run_stage(config.name, config.factory, config.params, inbox, post)
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(ended.set)

        threading.Thread(target=run, name=config.name, daemon=True).start()
        try:
            await ended.wait()
        finally:
            inbox.put(Shutdown())

    def shut(self) -> None:
        self._inbox.put(Shutdown())
