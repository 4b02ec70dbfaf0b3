"""The torch trace of a process: the operators of all its threads, for a trace viewer.

Invariant: one trace per process, recorded by the first stage that starts: two open profilers would
crash the process. A failed trace is logged and has no other effect. torch is imported only for a
trace.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


_trace_lock = threading.Lock()  # held while a stage of this process records a trace


class TorchTrace:
    """One stage's use of the process's trace; started and stopped in that stage's thread."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._active: Any = None
        self._path = Path()
        self._run_id = ""

    def start(self, run_id: str, template: str) -> None:
        """`template` may contain {run_id} and {stage} (api-server.md 4.1)."""
        self.stop(None)
        if not _trace_lock.acquire(blocking=False):
            return  # another stage of this process records this one's work, too
        named = template.replace("{run_id}", run_id).replace("{stage}", self._stage)
        self._path = Path(f"{named}_pid{os.getpid()}.json")
        try:
            from torch._C._profiler import _ExperimentalConfig
            from torch.profiler import ProfilerActivity, profile

            self._active = profile(
                activities=[ProfilerActivity.CPU],
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self._active.__enter__()
            self._run_id = run_id
        except (ImportError, RuntimeError) as error:
            self._active = None
            _trace_lock.release()
            log.error("torch_trace_failed stage=%s error=%s", self._stage, error)

    def stop(self, run_id: str | None) -> None:
        if self._active is None or run_id not in (None, self._run_id):
            return
        active, self._active = self._active, None
        try:
            active.__exit__(None, None, None)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            active.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            log.error("torch_trace_not_written stage=%s error=%s", self._stage, error)
        finally:
            _trace_lock.release()
