"""Follows the KV events of workers: finds publishers, runs the subscriber, forwards changes.

Invariants: a worker or rank has at most one subscription, to the publisher of its current settings
or, for `kv_events = "auto"`, the one that its engine reports; an engine without one is not queried
again until it becomes healthy again. Changes of a former subscription, or from before a flush, are
not forwarded. Without a worker with `kv_events` there is no process. If the process fails, every
worker counts as publishing nothing, and the supervisor restarts the service. Sources:
note:real-engines 4 (which side binds), note:features 7.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, NamedTuple

import msgspec
import trio

from omni_proxy.config.validate import KV_EVENTS_INSTALL, KV_EVENTS_MODULE
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import KvMode, Worker
from omni_proxy.health.engine_pages import (
    SERVER_INFO,
    EnginePage,
    Fetch,
    PageReader,
    was_reached,
)
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
from omni_proxy.multiprocess.ipc.channel import IpcChannel
from omni_proxy.routing.kv_events.engine_blocks import ChangeOp, PackedChanges
from omni_proxy.shared.child_process import program_argv, wait_or_kill
from omni_proxy.wire.load_report import MAX_RANKS

_log = logging.getLogger(__name__)

KV_EVENT_SOURCES: Final = EnginePage(("/kv_event_sources",), 15.0, 1024 * 1024)
_TCP: Final = re.compile(r"tcp://(.+):([0-9]{1,5})")


class EventSource(NamedTuple):
    """A publisher. `binds`: this proxy binds `endpoint`, and the publisher connects to it.

    `replay`: endpoint of its replay socket, or "".
    """

    endpoint: str
    binds: bool
    replay: str = ""


class EventSources(PageReader):
    """Reads publishers. `report(worker, sources)` gets one for each rank, in order, or none."""

    def __init__(self, report: Callable[[Worker, tuple[EventSource, ...]], None]) -> None:
        self._report = report

    def wants(self, worker: Worker) -> bool:
        return worker.kv_events == "auto"

    async def read(self, worker: Worker, fetch: Fetch) -> bool:
        host = host_of(worker)
        listed = await fetch(KV_EVENT_SOURCES)
        sources = vllm_sources(listed.json(), host) if listed.ok else ()
        if not sources:
            info = await fetch(SERVER_INFO)
            if not was_reached(info) or not was_reached(listed):
                return False
            sources = sglang_sources(info.json(), host) if info.ok else ()
        self._report(worker, sources)
        return True


def host_of(worker: Worker) -> str:
    """The host of the worker's URL, in the form of an endpoint."""
    address = worker.address
    host = "127.0.0.1" if isinstance(address, str) else address[0]
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def configured_source(endpoint: str, replay: str, rank: int) -> EventSource:
    """The source of the keys `kv_events` and `kv_replay`; with host `*` this proxy binds."""
    return EventSource(_shifted(endpoint, rank), "*" in endpoint, _shifted(replay, rank))


def vllm_sources(body: object, host: str) -> tuple[EventSource, ...]:
    """Sources in a response of /kv_event_sources, which has an entry for each rank."""
    if not isinstance(body, dict):
        return ()
    ranks = [body.get(str(rank)) for rank in range(min(len(body), MAX_RANKS))]
    sources = [_reported(entry, host) for entry in ranks if isinstance(entry, dict)]
    valid = [source for source in sources if source is not None]
    return tuple(valid) if len(valid) == len(body) else ()


def sglang_sources(body: object, host: str) -> tuple[EventSource, ...]:
    """Sources in a response of /server_info: a list, or the first of consecutive ports."""
    events = body.get("kv_events") if isinstance(body, dict) else None
    if not isinstance(events, dict) or events.get("publisher") != "zmq":
        return ()
    listed = events.get("publishers")
    if isinstance(listed, list) and listed:
        sources = [_reported(entry, host) for entry in listed if isinstance(entry, dict)]
        return tuple(source for source in sources if source is not None)
    name, port = events.get("endpoint_host"), events.get("endpoint_port_base")
    ranks = events.get("dp_size", 1)
    if not isinstance(name, str) or type(port) is not int or type(ranks) is not int:
        return ()
    shown = f"[{name}]" if ":" in name and not name.startswith("[") else name
    replay = events.get("replay_endpoint")
    first = {"endpoint": f"tcp://{shown}:{port}", "replay_endpoint": replay}
    base = _reported(first, host)
    if base is None or not 1 <= ranks <= MAX_RANKS:
        return ()
    return tuple(
        base._replace(endpoint=_shifted(base.endpoint, rank), replay=_shifted(base.replay, rank))
        for rank in range(ranks)
    )


def _reported(entry: Mapping[str, object], host: str) -> EventSource | None:
    """A publisher as its engine reports it; None if it is off or unsupported.

    The publisher binds if its endpoint has `*` or `::`, or is ipc; otherwise it connects.
    """
    endpoint, replay = entry.get("endpoint"), entry.get("replay_endpoint")
    if entry.get("enable_kv_cache_events") is False or entry.get("publisher", "zmq") != "zmq":
        return None
    if not isinstance(endpoint, str) or not endpoint.startswith(("tcp://", "ipc://")):
        return None
    publisher_binds = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
    dialled = _dialled(replay, host) if isinstance(replay, str) else ""
    return EventSource(_dialled(endpoint, host), not publisher_binds, dialled)


def _dialled(endpoint: str, host: str) -> str:
    """The endpoint with an address that this machine can reach."""
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return endpoint
    everywhere = match[1] in ("*", "::", "[::]", "0.0.0.0")
    return f"tcp://{host if everywhere else match[1]}:{match[2]}"


def _shifted(endpoint: str, rank: int) -> str:
    match = _TCP.fullmatch(endpoint)
    return f"tcp://{match[1]}:{int(match[2]) + rank}" if match and rank else endpoint


SUBCOMMAND: Final = "kv-events-process"
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
                    _log.error(
                        "kv_events_unavailable missing=pyzmq hint=%s was=kv_events_impossible",
                        KV_EVENTS_INSTALL,
                    )
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
        except* SubscriberFailed as errors:
            self._show_all("degraded", "the subscriber process ended")
            raise errors.exceptions[0] from None
        finally:
            self._channel = None
            channel.close()
            for followed in list(self._followed.values()):
                self._unsubscribe(followed)
            if process is not None:
                with trio.CancelScope(shield=True):
                    await wait_or_kill(process)

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
                "kv_events_undecodable worker=%s events=%d reason=%s",
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
            _set_mode(worker, "inferred", self._not_followed_reason(worker, len(targets)))
            return
        worst = max(followed, key=lambda subscription: _MODES.index(subscription.mode))
        rank = f"rank {targets.index(worst.target)}: " if worker.dp_ranks else ""
        _set_mode(worker, worst.mode, rank + worst.reason)

    def _not_followed_reason(self, worker: Worker, targets: int) -> str:
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
        level, "kv_events_mode worker=%s from=%s to=%s reason=%s",
        worker.url, before, mode, reason,
    )  # fmt: skip
