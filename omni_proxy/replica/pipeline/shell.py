"""What surrounds a stage wherever it runs: its factory, its run, and word of both.

Invariant: the last message of a stage is `StageEnded`, however it ended; before it, and after the
factory has returned, there is one `StageReady`.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Mapping
from functools import partial
from typing import Any

from omni_proxy.replica.pipeline.messages import Emit, In, StageEnded, StageReady
from omni_proxy.replica.pipeline.plan import resolve
from omni_proxy.replica.pipeline.stage import Scheduler
from omni_proxy.replica.profiling.recorder import STAGES
from omni_proxy.replica.profiling.watched import WatchedEmit, WatchedInbox

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

Inbox = queue.SimpleQueue[In]


def inbox_of(stage: str) -> Inbox:
    """The stage's inbox; what only the profiler wants to know ends in it."""
    return WatchedInbox(stage)


def run_stage(name: str, factory: str, params: Mapping[str, Any], inbox: Inbox, emit: Emit) -> None:
    """Make the scheduler and run it until `Shutdown`; blocks, in the stage's own thread."""
    error = ""
    try:
        scheduler: Scheduler = resolve(factory)(name, **params)
        if hasattr(scheduler, "record"):
            scheduler.record = partial(_record, name)
        info = {"supports_admin": scheduler.supports_admin, **getattr(scheduler, "info", {})}
        emit(StageReady(name, info))
        scheduler.run(inbox, WatchedEmit(name, emit))
    except ModuleNotFoundError as fault:
        error = missing(fault)
    except Exception as fault:  # a stage may be anyone's: it ends alone, the server tells why
        log.exception("stage %s ended by a fault", name)
        error = f"{type(fault).__name__}: {fault}"
    emit(StageEnded(name, error))


def _record(stage: str, event: str, request_id: str, seen: dict[str, Any]) -> None:
    STAGES.record(event, request_id, stage, seen)


def missing(fault: ModuleNotFoundError) -> str:
    """What lacks, and for what the package itself needs, how to get it."""
    name = (fault.name or "").partition(".")[0]
    if name in ("", "omni_proxy"):
        return str(fault)
    return f"the package {name} is not installed: pip install 'omni-proxy[replica]'"
