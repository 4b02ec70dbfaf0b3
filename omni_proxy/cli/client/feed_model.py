"""Types of a snapshot of GET /feed.

Pure. Unknown fields, of a newer proxy, are ignored; missing fields, of an older one, have the
defaults of these types.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from omni_proxy.cli.client.admin_client import AdminClientError

PATH = "/feed"


class DrainRow(Struct, frozen=True):
    state: str = "draining"  # draining, drained or overdue
    in_flight: int = 0
    since: str | None = None
    deadline: str | None = None
    remove: bool = False


class PausedWorker(Struct, frozen=True):
    """The pause of an engine: ISO time, caller, path and mode; None: unknown."""

    at: str | None = None
    by: str | None = None
    path: str | None = None
    mode: str | None = None


class EngineLoadRow(Struct, frozen=True):
    """The last load report of a worker's engine."""

    waiting: float | None = None
    kv_usage: float | None = None  # 0 to 1


class MinuteRow(Struct, frozen=True):
    """Means over a worker's last minute."""

    between_p50_ms: float | None = None  # between two chunks of a stream
    input_tokens_per_sec: float | None = None
    output_tokens_per_sec: float | None = None
    cache_hit_ratio: float | None = None  # 0 to 1, of prompt tokens


class SlowRow(Struct, frozen=True):
    """`times`: the worker's time as a multiple of the others'. `text`: what is slow, and why."""

    times: float = 0.0
    text: str = ""


class FleetRow(Struct, frozen=True):
    """A worker; rates, errors and times are of the last minute."""

    id: str
    url: str
    display_id: str = ""
    model: str | None = None
    role: str = "regular"
    health: str = "unknown"
    routable: bool = False
    disabled: bool = False
    half_open: bool = False
    held_by: tuple[str, ...] = ()
    why: str | None = None
    overloaded: str | None = None  # the reason, from its engine's load report
    since: str | None = None
    last_error: str | None = None
    in_flight: int = 0
    max_inflight: int = 0
    sessions: int = 0  # sticky sessions on this worker
    kv_mode: str = "off"
    kv_reason: str = ""
    ranks_in_flight: tuple[int, ...] = ()  # of each data-parallel rank
    rate: float = 0.0
    errors: int = 0
    answers: int = 0
    first_p50_ms: float | None = None
    first_p99_ms: float | None = None
    silent_secs: float | None = None  # if it is longer than usual
    slow: SlowRow | None = None  # compared with the other workers of its model
    routed: int = 0
    failed: int = 0
    weight_version: str | None = None
    weight_epoch: int = 0
    origin: str = ""
    weight: int = 1
    drain: DrainRow | None = None
    launch: dict[str, Any] | None = None
    engine_load: EngineLoadRow | None = None
    minute: MinuteRow = MinuteRow()
    paused: PausedWorker | None = None

    @property
    def name(self) -> str:
        return self.display_id or self.url.partition("://")[2] or self.url


class HistoryPoint(Struct, frozen=True):
    """A second of the past; `at` in seconds since 1970."""

    at: float
    requests: int = 0
    errors: int = 0
    first_p50_ms: float | None = None
    first_p99_ms: float | None = None
    in_flight: int = 0
    waiting: int = 0


class FinishedRequest(Struct, frozen=True):
    """A request that has ended."""

    at: str = ""
    route: str = ""
    model: str | None = None
    worker: str | None = None
    prefill: str | None = None  # the worker of its prefill leg
    status: int = 0
    end: str = ""
    ended_by: str | None = None
    error: str | None = None
    attempts: int = 0
    total_ms: float | None = None
    request_id: str | None = None


class Admission(Struct, frozen=True):
    inflight: int = 0
    max_inflight: int = 0
    waiting: int = 0
    peak_waiting: int = 0


class ServiceStatus(Struct, frozen=True):
    name: str = ""
    state: str = "running"
    restarts: int = 0
    last_error: str | None = None
    same_as: str = ""  # the service's new name, in a row with its old one


class WatchdogStatus(Struct, frozen=True):
    """How often an event loop of the proxy was blocked for a second or more."""

    stalls: int = 0
    last_stall_at: str | None = None
    last_stall_secs: float | None = None


class LastMinute(Struct, frozen=True):
    """Requests of the fleet that ended in the last minute, the current second included."""

    requests: int = 0
    errors: int = 0


class ClusterPeer(Struct, frozen=True):
    member: str
    age_secs: float = 0.0
    in_flight: int = 0
    # None: from a proxy of an older release.
    version: str | None = None
    requests_per_sec: float | None = None


class ClusterStatus(Struct, frozen=True):
    """This proxy as a member of a cluster."""

    name: str = ""
    store: str = ""
    connected: bool = False
    error: str | None = None
    peers: tuple[ClusterPeer, ...] = ()


class DiscoverySource(Struct, frozen=True):
    """One `[[discover]]`."""

    name: str = ""
    state: str = ""
    error: str | None = None
    age_secs: float | None = None  # since the source last answered
    workers: dict[str, int] = {}  # number by discovery state
    ignored: dict[str, str] = {}  # unusable endpoints, and why


class FeedModel(Struct, frozen=True):
    at: str
    revision: int
    ready: bool
    fleet: tuple[FleetRow, ...]
    version: str = ""
    pid: int = 0
    uptime_secs: float = 0.0
    leaving: bool = False
    reason: str | None = None  # why it is not ready, in one word
    metrics: bool = True
    config_file: str | None = None
    admission: Admission = Admission()
    policy: dict[str, Any] = {}
    history: tuple[HistoryPoint, ...] = ()
    last_minute: LastMinute | None = None  # None: from a proxy of an older release
    recent_ends: tuple[FinishedRequest, ...] = ()
    last_reload: dict[str, Any] | None = None
    supervisors: tuple[ServiceStatus, ...] = ()
    watchdog: WatchdogStatus = WatchdogStatus()
    weights: dict[str, Any] | None = None
    discovery: tuple[DiscoverySource, ...] = ()
    cluster: ClusterStatus | None = None  # None: not a member of one
    refused_without_key: int = 0  # since the start
    refused_without_key_last_minute: int = 0


def read_feed(text: str | bytes) -> FeedModel:
    """Raises AdminClientError for text that is not a snapshot."""
    try:
        return msgspec.json.decode(text, type=FeedModel)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeError) as error:
        raise AdminClientError(
            f"the reply is not a snapshot that this version can read: {error}"
        ) from None


def feed_of(snapshot: dict[str, Any]) -> FeedModel:
    """Like `read_feed`, but from decoded JSON. Raises AdminClientError."""
    try:
        return msgspec.convert(snapshot, FeedModel)
    except msgspec.ValidationError as error:
        raise AdminClientError(
            f"the reply is not a snapshot that this version can read: {error}"
        ) from None
