"""Fetches status endpoints of engines, such as /server_info, for readers.

A reader reads a worker when the worker becomes healthy, when another process answers at its URL,
and when a changed setting requires it. Reads with the same trigger share one call per page. A
failed read is repeated with back-off, a successful one after `refresh_secs_of`, as long as the
worker is healthy and the reader needs it. Invariant: a reader never gets a page that was requested
before its trigger, nor a page of a worker that it no longer needs; and there is only one task per
worker and reader. Only readers interpret pages and change workers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Final, TypeAlias

import trio

from omni_proxy.admin_ops.engine_dialects import SERVER_INFO_PATHS
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.shared.backoff import Backoff
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, CallResult, call_worker

RETRY_SECS: Final = 1.0  # after a failed read, doubling
MAX_RETRY_SECS: Final = 30.0
MAX_CALLS: Final = 64  # for one page at a time, when a whole fleet starts


@dataclass(frozen=True, slots=True)
class EnginePage:
    """A page of an engine, at the first of `targets` that the engine has."""

    targets: tuple[str, ...]
    timeout_secs: float
    max_bytes: int


# An engine's first response may take long.
SERVER_INFO: Final = EnginePage(
    (f"{SERVER_INFO_PATHS[0]}?config_format=json", SERVER_INFO_PATHS[1]), 15.0, 8 * 1024 * 1024
)
METRICS: Final = EnginePage(("/metrics",), 15.0, 8 * 1024 * 1024)
MODELS: Final = EnginePage(("/v1/models",), 5.0, 4 * 1024 * 1024)

CallWorker: TypeAlias = Callable[[Worker, Call], Awaitable[CallResult]]
Fetch: TypeAlias = Callable[[EnginePage], Awaitable[CallResult]]


class PageReader:
    """Reads a property of workers; a subclass stores it at the worker."""

    refresh_secs: float = inf

    def refresh_secs_of(self, worker: Worker) -> float:
        """Seconds until the next read after a successful one; infinite: only after a trigger."""
        return self.refresh_secs

    def wants(self, worker: Worker) -> bool:
        """Whether this healthy worker has to be read."""
        raise NotImplementedError

    async def read(self, worker: Worker, fetch: Fetch) -> bool:
        """Fetch and apply; returns whether the engine answered, otherwise the read is repeated."""
        raise NotImplementedError

    def begin(self, worker: Worker, *, first: bool) -> None:
        """A read is about to begin; `first`: none has ended since the worker was registered."""

    def end(self, worker: Worker) -> None:
        """No read is in progress, and none will follow without another trigger."""


class _Round:
    """The calls to one worker for one trigger."""

    __slots__ = ("_call_worker", "_calls", "_worker")

    def __init__(self, worker: Worker, call_worker: CallWorker) -> None:
        self._worker = worker
        self._call_worker = call_worker
        self._calls: dict[EnginePage, _SharedCall] = {}  # those in progress

    async def fetch(self, page: EnginePage, slots: trio.CapacityLimiter) -> CallResult:
        """The page; joins a call for it that is in progress."""
        while call := self._calls.get(page):
            await call.ended.wait()
            if call.result is not None:  # otherwise the task that made the call was cancelled
                return call.result
        self._calls[page] = call = _SharedCall()
        try:
            async with slots:
                call.result = await self._get(page)
            return call.result
        finally:
            del self._calls[page]
            call.ended.set()

    async def _get(self, page: EnginePage) -> CallResult:
        """The reply of the first target that the engine has; the last one's 404 if it has none."""
        *first, last = page.targets
        for target in first:
            result = await self._call(page, target)
            if result.status not in ROUTE_ABSENT:
                return result
        return await self._call(page, last)

    async def _call(self, page: EnginePage, target: str) -> CallResult:
        call = Call("GET", target, timeout_secs=page.timeout_secs, max_bytes=page.max_bytes)
        return await self._call_worker(self._worker, call)


class _SharedCall:
    __slots__ = ("ended", "result")

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.result: CallResult | None = None


class _PageTask:
    """The task that reads one worker for one reader, until another task replaces it."""

    __slots__ = ("read_once", "round", "scope")

    def __init__(self, round_: _Round) -> None:
        self.round = round_
        self.scope = trio.CancelScope()
        self.read_once = trio.Event()


class EnginePages:
    """`run` reads for all `readers`; `refresh` reads now. `call`: makes a call to a worker."""

    def __init__(
        self, fleet: Fleet, readers: Sequence[PageReader], call: CallWorker = call_worker
    ) -> None:
        self._fleet = fleet
        self._call_worker = call
        self._readers = readers
        self._nursery: trio.Nursery | None = None
        self._tasks: dict[tuple[Worker, PageReader], _PageTask] = {}
        self._have_read: dict[Worker, set[PageReader]] = {}  # whether or not the engine answered
        self._slots: dict[EnginePage, trio.CapacityLimiter] = {}
        fleet.watch_health(lambda worker, before: self._start_all(worker))
        fleet.watch_cache_cleared(self._start_all)
        fleet.watch_members(self.follow_settings)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for worker in self._fleet.workers:
                self._start_all(worker)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:  # in the body: a nursery whose tasks have ended is closed before it exits
                self._nursery = None

    def follow_settings(self) -> None:
        """Read each worker that a reader needs now and has not read yet."""
        workers = self._fleet.workers
        for gone in self._have_read.keys() - set(workers):
            del self._have_read[gone]
        for worker in workers:  # often a thousand, of which a few are new
            if worker.health.state is not Health.HEALTHY:
                continue
            have_read = self._have_read.get(worker, ())
            unread = [
                reader
                for reader in self._readers
                if reader not in have_read
                and reader.wants(worker)
                and (worker, reader) not in self._tasks
            ]
            if unread:
                round_ = self._round_of(worker)
                for reader in unread:
                    self._start_task(worker, reader, round_)

    async def refresh(self, reader: PageReader) -> None:
        """Read the pages of all workers that the reader needs; returns when all have ended, also
        unsuccessfully."""
        for task in self.restart(reader):
            await task.read_once.wait()

    def restart(self, reader: PageReader) -> list[_PageTask]:
        """Read the pages of all workers that the reader needs now, and at its intervals."""
        begun = [
            self._start_task(worker, reader, self._round_of(worker))
            for worker in self._fleet.workers
        ]
        return [task for task in begun if task is not None]

    def _round_of(self, worker: Worker) -> _Round:
        return _Round(worker, self._call_worker)

    def _start_all(self, worker: Worker) -> None:
        round_ = self._round_of(worker)
        for reader in self._readers:
            self._start_task(worker, reader, round_)

    def _start_task(self, worker: Worker, reader: PageReader, round_: _Round) -> _PageTask | None:
        """Start to read, replacing a task that may have read before the trigger."""
        if self._nursery is None or not self._is_wanted(worker, reader):
            return None
        before = self._tasks.get((worker, reader))
        self._tasks[worker, reader] = task = _PageTask(round_)
        if before is not None:
            before.scope.cancel()
        reader.begin(worker, first=reader not in self._have_read.get(worker, ()))
        self._nursery.start_soon(self._read_repeatedly, worker, reader, task)
        return task

    def _is_wanted(self, worker: Worker, reader: PageReader) -> bool:
        return self._fleet.has_healthy(worker) and reader.wants(worker)

    async def _read_repeatedly(self, worker: Worker, reader: PageReader, task: _PageTask) -> None:
        async def fetch(page: EnginePage) -> CallResult:
            slots = self._slots.setdefault(page, trio.CapacityLimiter(MAX_CALLS))
            result = await task.round.fetch(page, slots)
            if not self._is_wanted(worker, reader):
                task.scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()
            return result

        backoff = Backoff(RETRY_SECS, MAX_RETRY_SECS)
        try:
            with task.scope:
                while self._is_wanted(worker, reader):
                    answered = await reader.read(worker, fetch)
                    self._have_read.setdefault(worker, set()).add(reader)
                    task.read_once.set()
                    if answered:
                        backoff.reset()
                    pause_secs = (
                        reader.refresh_secs_of(worker) if answered else backoff.next_delay()
                    )
                    if not isfinite(pause_secs):
                        break
                    await trio.sleep(pause_secs)
        finally:
            task.read_once.set()
            if self._tasks.get((worker, reader)) is task:
                del self._tasks[worker, reader]
                reader.end(worker)


def was_reached(result: CallResult) -> bool:
    """Whether the engine answered; False after a failed connection or a 5xx: a retry may help."""
    return result.status is not None and result.status < 500
