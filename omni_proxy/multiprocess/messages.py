"""What control and a door process say to each other: frames on one Unix socket.

Invariant: each side takes the other's messages in the order in which they were sent, and a door
acknowledges each batch after it has taken effect. Both sides are the same build, so there are no
versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from omni_proxy.config.schema import Config
from omni_proxy.fleet.worker_state import WorkerState

LENGTH_BYTES: Final = 4


class Begin(Struct, frozen=True, tag=True):
    """The first to a door, with the descriptors of the shared counts and sessions."""

    index: int
    front_socket: str
    silent_secs: float
    proxy_id: str = ""


class VoiceListMessage(Struct, frozen=True):
    """The registry of uploaded voices; `names` is None while they are unknown."""

    owner: str
    names: tuple[str, ...] | None


class StateSnapshot(Struct, frozen=True, tag=True):
    """How things stand; None where that is as it was. `multiprocess`: the highest index in use.
    `voice_changes`: how many KeptVoices of this process `voices` already takes into account."""

    revision: int
    rows: tuple[WorkerState, ...] | None
    config: Config | None
    voices: VoiceListMessage
    voice_changes: int
    doors: int


class Listen(Struct, frozen=True, tag=True):
    """Accept on these sockets, whose descriptors come along, and on no others."""

    count: int


class Forget(Struct, frozen=True, tag=True):
    """What this worker had cached is gone."""

    serial: int


class DrainCommand(Struct, frozen=True, tag=True):
    """No new connection; end once the last one has ended."""


ToDoor: TypeAlias = Begin | StateSnapshot | Listen | Forget | DrainCommand


class Ack(Struct, frozen=True, tag=True):
    """So many messages have taken effect; `revision` is that of the newest StateSnapshot."""

    count: int
    revision: int


class Shut(Struct, frozen=True, tag=True):
    """It can't take the sockets that it was told to listen on, and stays at those it has."""

    error: str


class Failed(Struct, frozen=True, tag=True):
    """A request failed in a way that speaks of its worker's health."""

    serial: int
    status: int | None
    error: str
    at: datetime
    half_open_id: int


class Good(Struct, frozen=True, tag=True):
    serial: int
    half_open_id: int


class TrialBegan(Struct, frozen=True, tag=True):
    serial: int
    half_open_id: int


class TrialEnded(Struct, frozen=True, tag=True):
    serial: int
    half_open_id: int


class KeptVoices(Struct, frozen=True, tag=True):
    """A worker took an upload or a deletion of a voice."""

    serial: int


class LogLines(Struct, frozen=True, tag=True):
    """For the access log and the route log; `dropped`: what did not fit in between."""

    access: list[bytes]
    route: list[bytes]
    dropped: int


class Spread(Struct, frozen=True, array_like=True):
    """A histogram's new values: how many at each place."""

    places: dict[int, int]
    sum: float


class CellTally(Struct, frozen=True, array_like=True):
    """What was added to one `observe.metrics.Cell`; serial 0: no worker."""

    route: str
    serial: int
    ends: list[tuple[str | None, int, str, int]]
    spreads: tuple[Spread, Spread, Spread]  # total, first, between
    sums: tuple[int, int, int]  # bytes in and out, pieces
    tokens: list[tuple[str | None, str, int]]


class SlotTally(Struct, frozen=True, array_like=True):
    """What was added to one `telemetry.recent_window.Slot`; serial -1: the whole door's."""

    serial: int
    requests: int
    errors: int
    firsts: dict[int, int]


class EndTally(Struct, frozen=True, array_like=True):
    """One of `telemetry.recent_window`: `end` has its fields, in their order."""

    trouble: bool
    end: tuple[Any, ...]


class Tally(Struct, frozen=True, tag=True):
    """Everything that was counted since the last one."""

    cells: list[CellTally]
    phases: dict[str, list[Spread]]
    slots: list[SlotTally]
    ends: list[EndTally]
    failed_tries: list[tuple[int, str, int]]
    retries: int
    worker_ends: list[tuple[int, str, int, int, int]]  # traffic, routed, succeeded, failed


class ProcessStats(Struct, frozen=True, tag=True):
    """A door's row at GET /status: `counts` only rise while it lives."""

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


ToControl: TypeAlias = (
    Ack
    | Shut
    | Failed
    | Good
    | TrialBegan
    | TrialEnded
    | KeptVoices
    | LogLines
    | Tally
    | ProcessStats
)

_encode = msgspec.msgpack.Encoder().encode


def framed(message: ToDoor | ToControl) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class MessageFrames:
    """Bytes in as they come, whole bodies out."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        held = self._held
        held += data
        begin = 0
        while len(held) >= begin + LENGTH_BYTES:
            end = begin + LENGTH_BYTES + int.from_bytes(held[begin : begin + LENGTH_BYTES], "big")
            if len(held) < end:
                break
            yield bytes(held[begin + LENGTH_BYTES : end])
            begin = end
        del held[:begin]
