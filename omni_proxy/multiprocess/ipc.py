"""The messages between the main process and a data-plane process, and the socket that carries them.

The main process sends `ProcessCommand`s, a data-plane process `ProcessEvent`s, both as MessagePack,
on one Unix socket; file descriptors are passed along (SCM_RIGHTS, unix(7)). Both sides are the same
build, so the format has no version.

Invariant: messages are sent in the order of `send`, which never waits, and take effect in that
order. The data-plane process acknowledges them in batches, each after it has taken effect. The
descriptors of a message arrive no later than its bytes, because the kernel attaches them to these
bytes, and are never mixed with another message's. If not all can be received, none are.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec
import trio
from msgspec import Struct

from omni_proxy.admin_ops.abort_requests import AbortFindings, AbortTarget
from omni_proxy.config.api_keys import CallerKey
from omni_proxy.config.schema import Config
from omni_proxy.fleet.worker import WorkerState
from omni_proxy.shared import fd_passing
from omni_proxy.telemetry.recent_window import FinishedExchange

LENGTH_BYTES: Final = 4


class StartCommand(Struct, frozen=True, tag=True):
    """The first command; the descriptors of shared counters, sessions and keys are attached.

    `silent_secs`: time without a message after which /ready of the process fails. `tree_seed`: seed
    of the hashes in prefix trees.
    """

    index: int
    admin_socket: str
    silent_secs: float
    proxy_id: str = ""
    tree_seed: int = 0


class VoiceListMessage(Struct, frozen=True):
    """The registry of uploaded voices; `names` is None while they are unknown."""

    owner: str
    names: tuple[str, ...] | None


class CallersMessage(Struct, frozen=True):
    """The resolved keys of callers, with the slot of each. `highest`: index of the last counter
    row."""

    entries: tuple[CallerKey, ...] = ()
    slots: tuple[int, ...] = ()
    highest: int = 0


class StateSnapshot(Struct, frozen=True, tag=True):
    """The fleet and the configuration at one moment; None for a part that has not changed.

    `processes`: the highest process index in use. `voice_changes`: number of this process's
    VoicesChangedEvents that `voices` includes.
    """

    revision: int
    rows: tuple[WorkerState, ...] | None
    config: Config | None
    voices: VoiceListMessage
    voice_changes: int
    processes: int
    callers: CallersMessage | None = None


class ListenCommand(Struct, frozen=True, tag=True):
    """Accept only on the sockets whose descriptors are attached."""

    count: int


class ClearCacheCommand(Struct, frozen=True, tag=True):
    """This worker's prefix cache has been cleared."""

    serial: int


LoadRow: TypeAlias = tuple[int, float | None, float | None, float]


class EngineLoadsCommand(Struct, frozen=True, tag=True):
    """Load reports of engines: serial, waiting requests, share of the KV cache in use, and time of
    arrival, by the clock that all processes share."""

    rows: list[LoadRow]


class EngineLoadsEvent(Struct, frozen=True, tag=True):
    """Load reports that this process received in responses; rows as in EngineLoadsCommand."""

    rows: list[LoadRow]


class KvChangesCommand(Struct, frozen=True, tag=True):
    """Changes of the KV cache of a worker or rank, from its KV events; `holder`: its URL."""

    holder: str
    changes: list[tuple[int, bytes]]


class ClusterHintsCommand(Struct, frozen=True, tag=True):
    """Prompt prefixes that another process or proxy has sent to a worker: packed hashes by
    `target_key`."""

    prefixes: dict[int, bytes]


class ClusterHintsEvent(Struct, frozen=True, tag=True):
    """Prompt prefixes that this process has sent, as in ClusterHintsCommand, and sessions that it
    has placed: `target_key` by digest."""

    prefixes: dict[int, bytes]
    sessions: dict[bytes, int]


class SaveTreesCommand(Struct, frozen=True, tag=True):
    """Write the prefix trees to the attached file."""


class LoadTreesCommand(Struct, frozen=True, tag=True):
    """Replace the prefix trees with those of the attached file."""


class AbortCommand(Struct, frozen=True, tag=True):
    """Abort the matching requests that wait in the queue, and report the workers of the running
    ones (AbortedEvent)."""

    number: int
    target: AbortTarget


class DrainCommand(Struct, frozen=True, tag=True):
    """Accept no new connection; exit after the last one has ended. `keeps_idle`: see
    `DataPlane.begin_drain`."""

    keeps_idle: bool = False


ProcessCommand: TypeAlias = (
    StartCommand
    | StateSnapshot
    | ListenCommand
    | ClearCacheCommand
    | EngineLoadsCommand
    | KvChangesCommand
    | ClusterHintsCommand
    | SaveTreesCommand
    | LoadTreesCommand
    | AbortCommand
    | DrainCommand
)


class AckEvent(Struct, frozen=True, tag=True):
    """`count` commands have taken effect; `revision` is that of the newest StateSnapshot."""

    count: int
    revision: int


class ListenFailedEvent(Struct, frozen=True, tag=True):
    """The process could not receive the sockets of a ListenCommand, and keeps its current ones."""

    error: str


class RequestFailedEvent(Struct, frozen=True, tag=True):
    """A request failed in a way that counts against its worker's health."""

    serial: int
    status: int | None
    error: str
    at: datetime
    half_open_id: int


class RequestSucceededEvent(Struct, frozen=True, tag=True):
    """The first success after failures, which resets the worker's failure count."""

    serial: int
    half_open_id: int


class HalfOpenStartedEvent(Struct, frozen=True, tag=True):
    """The process sends the single request to a half-open worker; `half_open_id`: its number."""

    serial: int
    half_open_id: int


class HalfOpenEndedEvent(Struct, frozen=True, tag=True):
    """The request of a HalfOpenStartedEvent has ended."""

    serial: int
    half_open_id: int


class VoicesChangedEvent(Struct, frozen=True, tag=True):
    """A worker accepted an upload or a deletion of a voice."""

    serial: int


class AbortedEvent(Struct, frozen=True, tag=True):
    """The result of the AbortCommand with this number; sent before its acknowledgement."""

    number: int
    findings: AbortFindings


class LogLinesEvent(Struct, frozen=True, tag=True):
    """Lines for the access log, the route log and the span exporter; `dropped`: for each of them,
    the number of lines that did not fit into its buffer."""

    access: list[bytes]
    route: list[bytes]
    spans: list[bytes]
    dropped: tuple[int, int, int]


class HistogramDelta(Struct, frozen=True, array_like=True):
    """New values of a histogram: `places` maps a bucket's index to its count."""

    places: dict[int, int]
    sum: float


class SeriesDelta(Struct, frozen=True, array_like=True):
    """New values of one `telemetry.metrics.RouteSeries`; serial 0: no worker."""

    route: str
    serial: int
    ends: list[tuple[str | None, int, str, int]]
    spreads: tuple[HistogramDelta, HistogramDelta, HistogramDelta]  # total, first, between
    sums: tuple[int, ...]  # in the order of `metrics_delta.SUMS`
    tokens: list[tuple[str | None, str, int]]


class WindowDelta(Struct, frozen=True, array_like=True):
    """New values of one second of the recent window; serial -1: for the whole process."""

    serial: int
    requests: int
    errors: int
    firsts: dict[int, int]


class RecentEndDelta(Struct, frozen=True, array_like=True):
    """A recently ended exchange."""

    trouble: bool
    end: FinishedExchange


class MetricsEvent(Struct, frozen=True, tag=True):
    """All metrics counted since the last MetricsEvent."""

    cells: list[SeriesDelta]
    phases: dict[str, list[HistogramDelta]]
    slots: list[WindowDelta]
    ends: list[RecentEndDelta]
    failed_attempts: list[tuple[int, str, int]]
    retries: int
    alias_targets: list[tuple[str, str, int]]  # alias, target
    legs: dict[str, HistogramDelta]
    transfer_failures: int
    fallbacks: dict[str, int]
    cached_tokens: list[tuple[int, int, int]]  # predicted, reported
    worker_ends: list[tuple[int, str, int, int, int]]  # traffic, routed, succeeded, failed
    exemplars: list[
        tuple[str, int, int, str, float, float]
    ]  # route, worker's serial, and the fields of `telemetry.exemplars`


class ProcessStats(Struct, frozen=True, tag=True):
    """The row of a process in GET /status; `counts` never decrease while the process lives."""

    counts: dict[str, int]
    ended: dict[str, int]
    connections: int
    waiting: int
    held_bytes: int
    phases: dict[str, int]
    oldest: list[dict[str, Any]]
    policy: dict[str, Any]
    lag_ms: float
    longest_turn_ms: float
    pool_policies: dict[str, dict[str, Any]] = {}


ProcessEvent: TypeAlias = (
    AckEvent
    | ListenFailedEvent
    | RequestFailedEvent
    | RequestSucceededEvent
    | HalfOpenStartedEvent
    | HalfOpenEndedEvent
    | VoicesChangedEvent
    | AbortedEvent
    | EngineLoadsEvent
    | ClusterHintsEvent
    | LogLinesEvent
    | MetricsEvent
    | ProcessStats
)

# Events after which no snapshot has to be published.
UNCHANGING: Final = (
    AckEvent,
    LogLinesEvent,
    ProcessStats,
    MetricsEvent,
    AbortedEvent,
    EngineLoadsEvent,
    ClusterHintsEvent,
)

_encode = msgspec.msgpack.Encoder().encode


def encode_frame(message: Struct) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class MessageFrames:
    """Splits a byte stream into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) >= start + LENGTH_BYTES:
            end = start + LENGTH_BYTES + int.from_bytes(buffer[start : start + LENGTH_BYTES], "big")
            if len(buffer) < end:
                break
            yield bytes(buffer[start + LENGTH_BYTES : end])
            start = end
        del buffer[:start]


READ_BYTES: Final = 1 << 18

Received = TypeVar("Received")


class IpcChannel(Generic[Received]):
    """One side of the socket. `decoder` is for received messages; `sent` counts sent ones."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Received]) -> None:
        sock.setblocking(False)
        self._sock = trio.socket.from_stdlib_socket(sock)
        self._decoder = decoder
        self._frames = MessageFrames()
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._queued = trio.Event()
        self._all_written = trio.Event()
        self._received_fds: deque[list[int] | None] = (
            deque()
        )  # None: they could not all be received
        self.sent = 0  # messages
        self.waiting_bytes = 0

    def send(self, message: Struct, descriptors: Iterable[int] = ()) -> int:
        """Queue a message; returns its number, from 1 on. `descriptors` are duplicated.

        Raises OSError if they can't be duplicated; then nothing is sent.
        """
        body = encode_frame(message)
        self._outgoing.append((body, fd_passing.duplicate_all(descriptors)))
        self.waiting_bytes += len(body)
        self.sent += 1
        self._queued.set()
        if self._all_written.is_set():
            self._all_written = trio.Event()
        return self.sent

    def take_descriptors(self) -> list[int]:
        """Descriptors of the next message that carried any.

        Raises OSError (EMFILE) if they exceeded the process's descriptor limit; they are lost then.
        """
        descriptors = self._received_fds.popleft()
        if descriptors is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptors

    async def receive(self) -> list[Received]:
        """The next messages; an empty list when the other side has closed."""
        while True:
            try:
                data, ancillary, flags, _ = await self._sock.recvmsg(
                    READ_BYTES, fd_passing.ANCILLARY_BYTES
                )
            except ConnectionError:
                return []
            descriptors = fd_passing.descriptors_in(ancillary)
            if flags & socket.MSG_CTRUNC:
                fd_passing.close_all(descriptors)
                self._received_fds.append(None)
            elif descriptors:
                self._received_fds.append(descriptors)
            if not data:
                return []
            messages = [self._decoder.decode(body) for body in self._frames.feed(data)]
            if messages:
                return messages

    async def run_writer(self) -> None:
        """Write queued messages, until cancelled or until the other side has closed."""
        try:
            while True:
                while self._outgoing:
                    await self._send_first()
                self._all_written.set()
                self._queued = trio.Event()
                await self._queued.wait()
        except OSError:
            return  # `receive` returns the end

    async def wait_flushed(self) -> None:
        """Wait until every queued message is written."""
        if self._outgoing:
            await self._all_written.wait()

    async def _send_first(self) -> None:
        body, descriptors = self._outgoing[0]
        sent = await self._sock.sendmsg([body], fd_passing.ancillary_for(descriptors))
        view = memoryview(body)[sent:]
        while view:
            view = view[await self._sock.send(view) :]
        self._outgoing.popleft()
        self.waiting_bytes -= len(body)
        fd_passing.close_all(descriptors)

    def shut(self) -> None:
        """Close for writing: the other side reads all that was sent, then the end."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()
        while self._outgoing:
            fd_passing.close_all(self._outgoing.popleft()[1])
        while self._received_fds:
            fd_passing.close_all(self._received_fds.popleft() or ())
