"""Prefetch of a weights file that is still being written, as far as its bytes are final.

The writer reports how far that is; when the file is complete, an update finds most of it in memory.
Invariant: prefetched bytes are used only by an update that names the same file, and are dropped
after KEEP_SECS without one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from omni_proxy.replica.weights.live_tensors import WeightsError
from omni_proxy.replica.weights.safetensors_loader import FileSelection, SafetensorsLoader

# How long a prefetched file is kept without an update: its writer may have failed.
KEEP_SECS: Final = 60.0
# Read per step, after which an update may take over; one thread, as other work goes on.
STEP_BYTES: Final = 64 << 20
THREADS: Final = 1


class FilePrefetcher:
    """Holds the latest file only. Safe from any thread; an update waits for one step at most."""

    def __init__(self, keep_secs: float = KEEP_SECS) -> None:
        self._keep_secs = keep_secs
        self._lock = threading.Lock()
        self._wanted = threading.Event()  # by an update, which reads what is missing faster
        self._path: Path | None = None
        self._loading: SafetensorsLoader | None = None
        self._timer: threading.Timer | None = None

    def read(self, path: Path, nbytes: int, opened: Callable[[], SafetensorsLoader]) -> int:
        """Reads the final first `nbytes`; returns how many bytes can be prefetched in all (0:
        none).

        Raises WeightsError, and OSError from the file; nothing is kept then.
        """
        with self._lock:
            if self._path != path:
                self._drop()
                self._path, self._loading = path, opened()
            loading = self._loading
            assert loading is not None
            try:
                for step in range(STEP_BYTES, nbytes + STEP_BYTES, STEP_BYTES):
                    if self._wanted.is_set():
                        break
                    loading.read(min(step, nbytes), THREADS)
            except (WeightsError, OSError):
                self._drop()
                raise
            self._wind()
            return sum(each.form.nbytes for each in loading.as_they_are)

    def take(self, parts: Sequence[FileSelection]) -> SafetensorsLoader | None:
        """The loader of exactly these files, which the caller ends; any other one is dropped."""
        self._wanted.set()
        try:
            with self._lock:
                loading = self._loading
                if loading is None or not loading.is_of(parts):
                    self._drop()
                    return None
                self._path = self._loading = None
                self._wind()
                return loading
        finally:
            self._wanted.clear()

    def _wind(self) -> None:
        """Restarts the expiry timer if anything is kept."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loading is not None:
            self._timer = threading.Timer(self._keep_secs, self._expire, [self._loading])
            self._timer.daemon = True
            self._timer.start()

    def _expire(self, loading: SafetensorsLoader) -> None:
        with self._lock:
            if self._loading is loading:
                self._drop()

    def _drop(self) -> None:
        loading, self._loading, self._path = self._loading, None, None
        self._wind()
        if loading is not None:
            with loading:
                loading.forget()
