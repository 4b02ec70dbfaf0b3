"""What surrounds a stage wherever it runs: its factory, its run, and word of both.

Invariant: the last message of a stage is `StageEnded`, however it ended; before it, and after the
factory has returned, there is one `StageReady`.
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

from omni_proxy.replica.pipeline.config import StageConfig
from omni_proxy.replica.pipeline.messages import Emit, Shutdown, StageEnded, StageInput, StageReady
from omni_proxy.replica.pipeline.plan import import_dotted
from omni_proxy.replica.pipeline.stage import Scheduler
from omni_proxy.replica.profiling.instrumented_queue import InstrumentedEmit, InstrumentedInbox
from omni_proxy.replica.profiling.recorder import STAGE_EVENTS

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

Inbox = queue.SimpleQueue[StageInput]


def make_inbox(stage: str) -> Inbox:
    """The stage's inbox; what only the profiler wants to know ends in it."""
    return InstrumentedInbox(stage)


def run_stage(name: str, factory: str, params: Mapping[str, Any], inbox: Inbox, emit: Emit) -> None:
    """Make the scheduler and run it until `Shutdown`; blocks, in the stage's own thread."""
    error = ""
    try:
        scheduler: Scheduler = import_dotted(factory)(name, **params)
        if hasattr(scheduler, "record"):
            scheduler.record = partial(_record, name)
        info = {"supports_admin": scheduler.supports_admin, **getattr(scheduler, "info", {})}
        emit(StageReady(name, info))
        scheduler.run(inbox, InstrumentedEmit(name, emit))
    except ModuleNotFoundError as fault:
        error = missing_package_message(fault)
    except Exception as fault:  # a stage may be anyone's: it ends alone, the server tells why
        log.exception("stage %s ended by a fault", name)
        error = f"{type(fault).__name__}: {fault}"
    emit(StageEnded(name, error))


def _record(stage: str, event: str, request_id: str, seen: dict[str, Any]) -> None:
    STAGE_EVENTS.record(event, request_id, stage, seen)


def missing_package_message(fault: ModuleNotFoundError) -> str:
    """What lacks, and for what the package itself needs, how to get it."""
    name = (fault.name or "").partition(".")[0]
    if name in ("", "omni_proxy"):
        return str(fault)
    return f"the package {name} is not installed: pip install 'omni-proxy[replica]'"


# Where a stage lives: a thread of this process. A host has one life after another.
#
# Invariant: when `live` returns, every stage of the host has posted its `StageEnded`, unless it was
# cancelled: a thread cannot be ended from outside, so it is told and left behind.


class StageHost(Protocol):
    """Holds some stages. `send` never blocks and may be called before the first life begins."""

    @property
    def stages(self) -> Sequence[str]: ...

    def send(self, stage: str, message: StageInput) -> None: ...

    async def live(self, post: Emit) -> None:
        """Run the stages until all have ended; `post` may be called from any thread."""

    def shut(self) -> None:
        """Ask the stages to end; `live` returns soon."""


class StageThread:
    """One stage in a thread of its own."""

    def __init__(self, config: StageConfig) -> None:
        self.stages = (config.name,)
        self._config = config
        self._inbox = make_inbox(config.name)
        self._lived = False

    def send(self, stage: str, message: StageInput) -> None:
        self._inbox.put(message)

    async def live(self, post: Emit) -> None:
        token = trio.lowlevel.current_trio_token()
        ended = trio.Event()
        if self._lived:
            self._inbox = make_inbox(
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
