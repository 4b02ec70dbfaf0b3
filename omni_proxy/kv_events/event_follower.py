"""Follows the KV events of workers: runs the subscriber process, and forwards its changes.

Invariants: a worker or rank has at most one subscription, to the publisher of its current settings;
changes of a former subscription, or from before a flush, are not forwarded. Without a worker with
`kv_events` there is no process. If the process fails, every worker counts as publishing nothing,
and the supervisor restarts the service.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import msgspec
import trio

from omni_proxy.config.validate import KV_EVENTS_INSTALL, KV_EVENTS_MODULE
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import KvMode, Worker
from omni_proxy.kv_events.event_sources import EventSource, EventSources, configured_source
from omni_proxy.kv_events.messages import (
    ChangesEvent,
    FlushedCommand,
    LimitCommand,
    PublisherReport,
    RepeatCommand,
    SubscribeCommand,
    SubscriberEvent,
    UnsubscribeCommand,
)
from omni_proxy.multiprocess.ipc import IpcChannel
from omni_proxy.routing.kv_events.held_changes import ChangeOp, PackedChanges
from omni_proxy.self_exec import program_argv

_log = logging.getLogger(__name__)

SUBCOMMAND: Final = "kv-events-process"
EXIT_SECS: Final = 2.0  # time between closing its socket and SIGKILL
WARN_SECS: Final = 60.0  # shortest interval of warnings about undecodable events
_FORGET: Final[PackedChanges] = [(int(ChangeOp.FORGET), b"")]
_MODES: Final[tuple[KvMode, ...]] = ("off", "exact", "inferred", "degraded")  # the worst is last
_NOT_REPORTED: Final = "the engine has not reported where it publishes"


class SubscriberFailed(Exception):
    """The subscriber process ended."""


@dataclass(slots=True)
class _Followed:
    """A subscription to one publisher of `target`, a worker or a rank."""

    target: Worker
    source: EventSource
    number: int
    generation: int = 0
    mode: KvMode = "inferred"
    reason: str = "the subscriber process starts"
    batches: int = 0
    undecodable: int = 0


@dataclass(slots=True)
class EventCounts:
    """Counts of a worker: batches of events, and events that could not be decoded."""

    batches: int = 0
    undecodable: int = 0
    warned_at: float = float("-inf")


class EventFollower:
    """`publish(url, changes)`: sends changes of a worker's or rank's blocks to all processes that
    route. `max_blocks()`: the configured limit."""

    def __init__(
        self,
        fleet: Fleet,
        publish: Callable[[str, PackedChanges], None],
        max_blocks: Callable[[], int],
    ) -> None:
        self.sources = EventSources(self._report_sources)
        self.counts: dict[Worker, EventCounts] = {}
        self._fleet = fleet
        self._publish = publish
        self._max_blocks = max_blocks
        self._followed: dict[Worker, _Followed] = {}
        self._by_number: dict[int, _Followed] = {}
        self._reported: dict[Worker, tuple[EventSource, ...]] = {}
        self._last_number = 0
        self._channel: IpcChannel[SubscriberEvent] | None = None
        self._changed = trio.Event()
        fleet.watch_members(self._changed_soon)
        fleet.watch_worker(lambda worker: self._changed_soon())
        fleet.watch_cache_cleared(self._flush)

    def settings_changed(self) -> None:
        """Send a limit that may have changed."""
        if self._channel is not None:
            self._channel.send(LimitCommand(self._max_blocks()))

    def repeat(self) -> None:
        """Publish all known blocks again, for a process that has just started."""
        if self._channel is not None:
            self._channel.send(RepeatCommand())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. Raises SubscriberFailed, OSError."""
        task_status.started()
        missing_logged = False
        while True:
            self._changed = trio.Event()
            if not any(worker.kv_events != "off" for worker in self._fleet.workers):
                self._follow()
            elif find_spec(KV_EVENTS_MODULE) is None:
                self._show_all("degraded", f"pyzmq is not installed: {KV_EVENTS_INSTALL}")
                if not missing_logged:
                    _log.error('kv_events_impossible reason="pyzmq missing: %s"', KV_EVENTS_INSTALL)
                missing_logged = True
            else:
                await self._run_process()
                self._changed.set()
            await self._changed.wait()

    async def _run_process(self) -> None:
        """Run the process until no worker has events to follow."""
        ours, theirs = socket.socketpair()
        channel: IpcChannel[SubscriberEvent] = IpcChannel(
            ours, msgspec.msgpack.Decoder(SubscriberEvent)
        )
        process: trio.Process | None = None
        try:
            with theirs:
                process = await trio.lowlevel.open_process(
                    [*program_argv(), SUBCOMMAND, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=dict(os.environ),
                )
            self._channel = channel
            channel.send(LimitCommand(self._max_blocks()))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(channel.run_writer)
                nursery.start_soon(self._follow_fleet, nursery)
                await self._receive(channel)
                raise SubscriberFailed("the subscriber process ended")
        except* SubscriberFailed as failed:
            self._show_all("degraded", "the subscriber process ended")
            raise failed.exceptions[0] from None
        finally:
            self._channel = None
            channel.close()
            for followed in list(self._followed.values()):
                self._unsubscribe(followed)
            if process is not None:
                with trio.CancelScope(shield=True):
                    await _end(process)

    async def _follow_fleet(self, nursery: trio.Nursery) -> None:
        """Keep subscriptions equal to the fleet's settings, until no worker has events."""
        while any(worker.kv_events != "off" for worker in self._fleet.workers):
            self._changed = trio.Event()
            self._follow()
            await self._changed.wait()
        self._follow()
        nursery.cancel_scope.cancel()

    async def _receive(self, channel: IpcChannel[SubscriberEvent]) -> None:
        while events := await channel.receive():
            for event in events:
                followed = self._by_number.get(event.number)
                if isinstance(event, PublisherReport):
                    if followed is not None:
                        self._take_report(followed, event)
                elif followed is not None and event.generation == followed.generation:
                    self._take_changes(followed, event)
                # At most one message in a turn of the event loop.
                await trio.lowlevel.checkpoint()

    def _take_changes(self, followed: _Followed, event: ChangesEvent) -> None:
        self._publish(followed.target.url, event.changes)

    def _take_report(self, followed: _Followed, report: PublisherReport) -> None:
        counts = self.counts.setdefault(followed.target.worker, EventCounts())
        counts.batches += report.batches - followed.batches
        counts.undecodable += report.undecodable - followed.undecodable
        now = trio.current_time()
        if report.undecodable > followed.undecodable and now - counts.warned_at >= WARN_SECS:
            counts.warned_at = now
            _log.warning(
                'kv_events_undecodable worker=%s events=%d reason="%s"',
                followed.target.url, counts.undecodable, report.undecodable_reason,
            )  # fmt: skip
        followed.batches, followed.undecodable = report.batches, report.undecodable
        followed.mode, followed.reason = _mode(report.mode), report.reason
        self._show(followed.target.worker)

    # Subscriptions

    def _changed_soon(self) -> None:
        self._changed.set()

    def _report_sources(self, worker: Worker, sources: tuple[EventSource, ...]) -> None:
        self._reported[worker] = sources
        self._changed_soon()

    def _follow(self) -> None:
        """Subscribe and unsubscribe as the fleet's current settings require."""
        members = set(self._fleet.workers)
        for gone in (self._reported.keys() | self.counts.keys()) - members:
            self._reported.pop(gone, None)
            self.counts.pop(gone, None)
        desired = dict(self._desired())
        for target, followed in list(self._followed.items()):
            if desired.get(target) != followed.source:
                self._unsubscribe(followed)
        for target, source in desired.items():
            if target not in self._followed and self._channel is not None:
                self._subscribe(target, source)
        for worker in members:
            self._show(worker)

    def _desired(self) -> Iterator[tuple[Worker, EventSource]]:
        for worker in self._fleet.workers:
            targets = worker.dp_ranks or (worker,)
            if worker.kv_events == "auto":
                reported = self._reported.get(worker, ())
                if len(reported) == len(targets):
                    yield from zip(targets, reported, strict=True)
            elif worker.kv_events != "off":
                for rank, target in enumerate(targets):
                    yield target, configured_source(worker.kv_events, worker.kv_replay, rank)

    def _subscribe(self, target: Worker, source: EventSource) -> None:
        assert self._channel is not None
        self._last_number = number = self._last_number + 1
        followed = _Followed(target, source, number)
        self._followed[target] = self._by_number[number] = followed
        self._channel.send(SubscribeCommand(number, source.endpoint, source.binds, source.replay))

    def _unsubscribe(self, followed: _Followed) -> None:
        del self._followed[followed.target], self._by_number[followed.number]
        if self._channel is not None:
            self._channel.send(UnsubscribeCommand(followed.number))
        self._publish(followed.target.url, _FORGET)

    def _flush(self, worker: Worker) -> None:
        """Start a new generation: the cache is empty, and data planes have dropped its blocks."""
        for target in (worker, *worker.dp_ranks):
            followed = self._followed.get(target)
            if followed is not None and self._channel is not None:
                followed.generation += 1
                self._channel.send(FlushedCommand(followed.number, followed.generation))

    # Modes of workers

    def _show_all(self, mode: KvMode, reason: str) -> None:
        for worker in self._fleet.workers:
            if worker.kv_events != "off":
                _set_mode(worker, mode, reason)

    def _show(self, worker: Worker) -> None:
        """Set the worker's mode: the worst one of its ranks."""
        if worker.kv_events == "off":
            _set_mode(worker, "off", "")
            return
        targets = worker.dp_ranks or (worker,)
        followed = [self._followed[target] for target in targets if target in self._followed]
        if len(followed) < len(targets):
            _set_mode(worker, "inferred", self._why_not_followed(worker, len(targets)))
            return
        worst = max(followed, key=lambda each: _MODES.index(each.mode))
        rank = f"rank {targets.index(worst.target)}: " if worker.dp_ranks else ""
        _set_mode(worker, worst.mode, rank + worst.reason)

    def _why_not_followed(self, worker: Worker, targets: int) -> str:
        reported = self._reported.get(worker)
        if worker.kv_events != "auto":
            return "the subscriber process starts"
        if reported is None:
            return _NOT_REPORTED
        if not reported:
            return "the engine reports no publisher: are its KV events on?"
        return (
            f"the engine has {len(reported)} publishers, one for each data-parallel rank, but the "
            f"worker is configured with {targets}: set ranks"
        )


def _mode(text: str) -> KvMode:
    return next((mode for mode in _MODES if mode == text), "degraded")


def _set_mode(worker: Worker, mode: KvMode, reason: str) -> None:
    before = worker.kv_mode
    worker.kv_reason = reason
    if mode == before:
        return
    worker.kv_mode = mode
    level = logging.WARNING if mode == "degraded" else logging.INFO
    _log.log(
        level, 'kv_events_mode worker=%s from=%s to=%s reason="%s"',
        worker.url, before, mode, reason,
    )  # fmt: skip


async def _end(process: trio.Process) -> None:
    """Wait for the process, which ends with its socket; kill it after EXIT_SECS."""
    with trio.move_on_after(EXIT_SECS):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
