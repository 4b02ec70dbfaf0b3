"""The messages between the main process and a data-plane process: frames on one Unix socket.

The main process sends a `ProcessCommand`, a data-plane process a `ProcessEvent`, both as
MessagePack. Invariant: messages take effect in the order in which they were sent, and the
data-plane process acknowledges each batch after it has taken effect. Both sides are the same
build, so the format has no version.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from omni_proxy.config.schema import Config
from omni_proxy.fleet.worker import WorkerState

LENGTH_BYTES: Final = 4


class StartCommand(Struct, frozen=True, tag=True):
    """The first command; the descriptors of the shared counters and sessions come with it.

    `silent_secs`: without a message for so long, /ready of the process fails.
    """

    index: int
    admin_socket: str
    silent_secs: float
    proxy_id: str = ""


class VoiceListMessage(Struct, frozen=True):
    """The registry of uploaded voices; `names` is None while they are unknown."""

    owner: str
    names: tuple[str, ...] | None


class StateSnapshot(Struct, frozen=True, tag=True):
    """The fleet and the configuration at one moment; None for a part that has not changed.

    `processes`: the highest index in use. `voice_changes`: how many VoicesChangedEvents of this
    process are already part of `voices`.
    """

    revision: int
    rows: tuple[WorkerState, ...] | None
    config: Config | None
    voices: VoiceListMessage
    voice_changes: int
    processes: int


class ListenCommand(Struct, frozen=True, tag=True):
    """Accept on these sockets, whose descriptors come with it, and on no others."""

    count: int


class ClearCacheCommand(Struct, frozen=True, tag=True):
    """This worker's prefix cache is empty."""

    serial: int


class DrainCommand(Struct, frozen=True, tag=True):
    """Accept no new connection; exit after the last one has ended."""


ProcessCommand: TypeAlias = (
    StartCommand | StateSnapshot | ListenCommand | ClearCacheCommand | DrainCommand
)


class AckEvent(Struct, frozen=True, tag=True):
    """So many commands have taken effect; `revision`: of the newest StateSnapshot."""

    count: int
    revision: int


class ListenFailedEvent(Struct, frozen=True, tag=True):
    """It could not take the sockets of a ListenCommand, and keeps those that it has."""

    error: str


class RequestFailedEvent(Struct, frozen=True, tag=True):
    """A request failed in a way that counts against its worker's health."""

    serial: int
    status: int | None
    error: str
    at: datetime
    half_open_id: int


class RequestSucceededEvent(Struct, frozen=True, tag=True):
    """Sent once after failures, so that the worker's count of failures is reset."""

    serial: int
    half_open_id: int


class HalfOpenStartedEvent(Struct, frozen=True, tag=True):
    """The process sends the one request to a half-open worker; `half_open_id`: its number."""

    serial: int
    half_open_id: int


class HalfOpenEndedEvent(Struct, frozen=True, tag=True):
    """That request has ended."""

    serial: int
    half_open_id: int


class VoicesChangedEvent(Struct, frozen=True, tag=True):
    """A worker accepted an upload or a deletion of a voice."""

    serial: int


class LogLinesEvent(Struct, frozen=True, tag=True):
    """For the access log and the route log; `dropped`: how many lines did not fit."""

    access: list[bytes]
    route: list[bytes]
    dropped: int


class HistogramDelta(Struct, frozen=True, array_like=True):
    """New values of a histogram: `places` maps a bucket's index to how many."""

    places: dict[int, int]
    sum: float


class SeriesDelta(Struct, frozen=True, array_like=True):
    """New values of one `telemetry.series.Cell`; serial 0: no worker."""

    route: str
    serial: int
    ends: list[tuple[str | None, int, str, int]]
    spreads: tuple[HistogramDelta, HistogramDelta, HistogramDelta]  # total, first, between
    sums: tuple[int, int, int]  # bytes in, bytes out, chunks
    tokens: list[tuple[str | None, str, int]]


class WindowDelta(Struct, frozen=True, array_like=True):
    """New values of one second of the recent window; serial -1: of the whole process."""

    serial: int
    requests: int
    errors: int
    firsts: dict[int, int]


class RecentEndDelta(Struct, frozen=True, array_like=True):
    """A recently ended exchange: `end` has the fields of `recent_window.End`, in their order."""

    trouble: bool
    end: tuple[Any, ...]


class MetricsEvent(Struct, frozen=True, tag=True):
    """All metrics that were counted since the last one."""

    cells: list[SeriesDelta]
    phases: dict[str, list[HistogramDelta]]
    slots: list[WindowDelta]
    ends: list[RecentEndDelta]
    failed_attempts: list[tuple[int, str, int]]
    retries: int
    worker_ends: list[tuple[int, str, int, int, int]]  # traffic, routed, succeeded, failed


class ProcessStats(Struct, frozen=True, tag=True):
    """The row of a process in GET /status; `counts` only rise while it lives."""

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


ProcessEvent: TypeAlias = (
    AckEvent
    | ListenFailedEvent
    | RequestFailedEvent
    | RequestSucceededEvent
    | HalfOpenStartedEvent
    | HalfOpenEndedEvent
    | VoicesChangedEvent
    | LogLinesEvent
    | MetricsEvent
    | ProcessStats
)

_encode = msgspec.msgpack.Encoder().encode


def encode_frame(message: ProcessCommand | ProcessEvent) -> bytes:
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
