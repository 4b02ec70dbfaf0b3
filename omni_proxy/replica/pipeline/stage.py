"""What a stage is: a scheduler with an inbox; and the scheduler for stages that are a function.

Invariant: an error of a request becomes one `StageFailure`, never an exception from `run`. After an
`Abort` nothing more is emitted for that request. Calls for one request never overlap.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from omni_proxy.replica.pipeline.messages import (
    Abort,
    Emit,
    Result,
    ResultChunk,
    Shutdown,
    StageFailure,
    StageInput,
    StagePayload,
    StageStats,
    StreamChunk,
    Submit,
)

log = logging.getLogger(__name__)

EmitChunk = Callable[[dict[str, Any]], None]
Aborted = Callable[[], bool]
StageFunction = Callable[[StagePayload, EmitChunk, Aborted], dict[str, Any]]


Record = Callable[[str, str, dict[str, Any]], None]


def ignore_event(event_name: str, request_id: str, metadata: dict[str, Any]) -> None:
    """The default `record`; the stage runner replaces it by a profiler's recorder."""


class Scheduler(Protocol):
    """What a stage's factory returns. `run` blocks in the stage's thread until `Shutdown`."""

    supports_admin: bool

    def run(self, inbox: queue.SimpleQueue[StageInput], emit: Emit) -> None: ...


class CallerError(Exception):
    """Raised by a stage's function: the request itself is invalid (HTTP: 400)."""


class StreamConsumer(Protocol):
    """The state of one request in a stage that another stage streams into."""

    def feed(self, chunk: dict[str, Any]) -> None:
        """Take the next chunk; all texts together are the complete text."""

    def finish(self) -> dict[str, Any]:
        """Return the result, after the last chunk."""


OpenConsumer = Callable[[StagePayload, EmitChunk, Aborted], StreamConsumer]


@dataclass(slots=True, eq=False)
class _Job:
    payload: StagePayload
    fed: bool
    chunks: deque[StreamChunk] = field(default_factory=deque)
    feed: StreamConsumer | None = None
    aborted: bool = False
    queued: bool = False
    chunk_count: int = 0


class FunctionScheduler:
    """Runs `function` for each request, `concurrency` requests at once, first in first out.

    `function(payload, emit_chunk, aborted)` returns the result's dict. It should call `aborted()`
    regularly and may return anything once that is true. Requests that another stage streams into go
    to `open_feed` instead, which a stage named in a `stream_to` must have. `marks` is the
    profiler's name of this work: NAME_start and NAME_end are recorded around each call.
    """

    supports_admin = False

    def __init__(
        self,
        stage_name: str,
        function: StageFunction,
        *,
        concurrency: int = 1,
        open_feed: OpenConsumer | None = None,
        marks: str = "",
    ) -> None:
        self.record: Record = ignore_event
        self._marks = marks
        self._stage = stage_name
        self._function = function
        self._open_feed = open_feed
        self._concurrency = concurrency
        self._lock = threading.Lock()  # over _jobs, _running and every job's fields
        self._jobs: dict[str, _Job] = {}
        self._running = 0
        self._ready: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def run(self, inbox: queue.SimpleQueue[StageInput], emit: Emit) -> None:
        workers = [
            threading.Thread(
                target=self._run_worker, args=(emit,), name=f"{self._stage}-{n}", daemon=True
            )
            for n in range(self._concurrency)
        ]
        for worker in workers:
            worker.start()
        while not isinstance(message := inbox.get(), Shutdown):
            self._handle(message, emit)
        with self._lock:
            for job in self._jobs.values():
                job.aborted = True
        for _ in workers:
            self._ready.put(None)
        for worker in workers:
            worker.join()

    def _handle(self, message: StageInput, emit: Emit) -> None:
        match message:
            case Submit(payload, _, fed):
                job = _Job(payload, fed)
                with self._lock:
                    self._jobs[payload.request_id] = job
                    self._queue(job)
                self._emit_stats(emit)
            case StreamChunk(request_id):
                with self._lock:
                    if fed_job := self._jobs.get(request_id):
                        fed_job.chunks.append(message)
                        self._queue(fed_job)
            case Abort(request_id):
                with self._lock:
                    if aborted_job := self._jobs.pop(request_id, None):
                        aborted_job.aborted = True
                self._emit_stats(emit)
            case _:
                pass

    def _queue(self, job: _Job) -> None:
        # A job stands in the queue once at most, and not while a thread works on it: so its calls
        # never overlap.
        if not job.queued:
            job.queued = True
            self._ready.put(job)

    def _run_worker(self, emit: Emit) -> None:
        while (job := self._ready.get()) is not None:
            with self._lock:
                self._running += 1
            try:
                result = self._advance(job, emit)
            except CallerError as error:
                self._finish(
                    job,
                    emit,
                    StageFailure(job.payload.request_id, self._stage, str(error), "caller"),
                )
            except (
                Exception
            ) as error:  # the function is anyone's: its fault is that request's alone
                log.exception("request_failed stage=%s", self._stage)
                reason = f"{type(error).__name__}: {error}"
                self._finish(job, emit, StageFailure(job.payload.request_id, self._stage, reason))
            else:
                if result is not None:
                    self._finish(job, emit, Result(job.payload.request_id, self._stage, result))
            with self._lock:
                self._running -= 1

    def _advance(self, job: _Job, emit: Emit) -> dict[str, Any] | None:
        """Call the function, or feed the chunks that have arrived; None while more are expected."""
        if job.aborted:
            return None

        def emit_chunk(chunk: dict[str, Any]) -> None:
            if not job.aborted:
                modality = "audio" if chunk.get("audio_data") is not None else "text"
                request_id = job.payload.request_id
                emit(ResultChunk(request_id, self._stage, chunk, job.chunk_count, modality))
                job.chunk_count += 1

        def aborted() -> bool:
            return job.aborted

        if not job.fed:
            return self._call_recorded(job.payload, emit_chunk, aborted)
        if job.feed is None:
            if self._open_feed is None:
                raise TypeError(f"stage {self._stage} cannot be streamed into")
            job.feed = self._open_feed(job.payload, emit_chunk, aborted)
        return self._feed_chunks(job, job.feed)

    def _call_recorded(
        self, payload: StagePayload, emit: EmitChunk, aborted: Aborted
    ) -> dict[str, Any]:
        if not self._marks:
            return self._function(payload, emit, aborted)
        self.record(f"{self._marks}_start", payload.request_id, {})
        try:
            return self._function(payload, emit, aborted)
        finally:
            self.record(f"{self._marks}_end", payload.request_id, {})

    def _feed_chunks(self, job: _Job, feed: StreamConsumer) -> dict[str, Any] | None:
        while True:
            with self._lock:
                if job.aborted or not job.chunks:
                    job.queued = False
                    return None
                chunk = job.chunks.popleft()
            feed.feed(chunk.chunk)
            if chunk.last:
                return feed.finish()

    def _finish(self, job: _Job, emit: Emit, message: Result | StageFailure) -> None:
        with self._lock:
            if job.aborted:
                return
            del self._jobs[job.payload.request_id]
        emit(message)
        self._emit_stats(emit)

    def _emit_stats(self, emit: Emit) -> None:
        with self._lock:
            running = min(self._running, len(self._jobs))
            waiting = len(self._jobs) - running
        emit(
            StageStats(
                self._stage,
                {"num_running_reqs": float(running), "num_waiting_reqs": float(waiting)},
            )
        )
