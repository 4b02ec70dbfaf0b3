"""A stage: its scheduler interface and inbox, a scheduler that calls a function, and its thread.

Invariant: an error of a request becomes one `StageFailure`, never an exception from `run`. After an
`Abort` nothing more is emitted for that request. Calls for one request never overlap. The first
message of a stage is `StageReady`, if its factory returned, and the last is `StageEnded`. When
`live` returns, every stage of the host has posted its `StageEnded`, unless `live` was cancelled: a
thread cannot be ended from outside.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import trio

from omni_proxy.replica.pipeline.config import StageConfig, import_dotted
from omni_proxy.replica.pipeline.instrumentation import (
    STAGE_EVENTS,
    InstrumentedEmit,
    InstrumentedInbox,
)
from omni_proxy.replica.pipeline.stage_messages import (
    Abort,
    Emit,
    Result,
    ResultChunk,
    Shutdown,
    StageEnded,
    StageFailure,
    StageInput,
    StagePayload,
    StageReady,
    StageStats,
    StreamChunk,
    Submit,
)

log = logging.getLogger(__name__)

EmitChunk = Callable[[dict[str, Any]], None]
Aborted = Callable[[], bool]
StageFunction = Callable[[StagePayload, EmitChunk, Aborted], dict[str, Any]]


Record = Callable[[str, str, dict[str, Any]], None]
Inbox = queue.SimpleQueue[StageInput]


def ignore_event(event_name: str, request_id: str, metadata: dict[str, Any]) -> None:
    """The default `record`; the stage runner replaces it with a profiler's recorder."""


class Scheduler(Protocol):
    """A stage's scheduler, created by its factory. `run` blocks in the stage's thread until
    `Shutdown`.
    """

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
    """Runs `function` for each request, up to `concurrency` at a time, first in first out.

    `function(payload, emit_chunk, aborted)` returns the result's dict. It should call `aborted()`
    regularly; once that is true, its return value is ignored. Requests that another stage streams
    into go to `open_feed` instead, which is required for a stage named in a `stream_to`. `marks` is
    the profiler's name of this work: NAME_start and NAME_end are recorded around each call.
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
        # A job is in the queue at most once, and not while a thread works on it, so its calls
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
            except Exception as error:  # user code may raise anything: only this request fails
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


def make_inbox(stage: str) -> Inbox:
    """Return the stage's inbox, which consumes the profiler's messages."""
    return InstrumentedInbox(stage)


def run_stage(name: str, factory: str, params: Mapping[str, Any], inbox: Inbox, emit: Emit) -> None:
    """Create the scheduler and run it until `Shutdown`; blocks, in the stage's thread."""
    reason = ""
    try:
        scheduler: Scheduler = import_dotted(factory)(name, **params)
        if hasattr(scheduler, "record"):
            scheduler.record = partial(_record, name)
        info = {"supports_admin": scheduler.supports_admin, **getattr(scheduler, "info", {})}
        emit(StageReady(name, info))
        scheduler.run(inbox, InstrumentedEmit(name, emit))
    except ModuleNotFoundError as error:
        reason = missing_package_message(error)
    except Exception as error:  # stages are user code: only this stage ends, with its reason
        log.exception("stage_crashed stage=%s", name)
        reason = f"{type(error).__name__}: {error}"
    emit(StageEnded(name, reason))


def _record(stage: str, event: str, request_id: str, seen: dict[str, Any]) -> None:
    STAGE_EVENTS.record(event, request_id, stage, seen)


def missing_package_message(error: ModuleNotFoundError) -> str:
    """The error message for a package that is not installed, with the command that installs it."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "omni_proxy"):
        return str(error)
    return f"the package {name} is not installed: pip install 'omni-proxy[replica]'"


# Hosts: a stage runs in a thread of this process, and can be run again after it has ended.
# A cancelled `live` sends Shutdown and leaves the thread running, since it cannot be killed.


class StageHost(Protocol):
    """Runs some stages. `send` never blocks and may be called before the first run."""

    @property
    def stages(self) -> Sequence[str]: ...

    def send(self, stage: str, message: StageInput) -> None: ...

    async def live(self, post: Emit) -> None:
        """Run the stages until all have ended; `post` may be called from any thread."""

    def shut(self) -> None:
        """Send Shutdown to the stages; `live` returns soon."""


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
            # Drop the messages that the previous run did not handle.
            self._inbox = make_inbox(self._config.name)
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
