"""The state that one program hands over to the next, as JSON (docs/upgrade.md). Pure.

Invariants: readers ignore unknown fields and use defaults for missing ones, so records may get new
fields under the same format number. A change that an older reader would misread needs a new number:
format 3 has additional descriptors, of files with prefix trees; 2 had another form of these files.
A worker with cordons that the next program would not lift gets none of its health back: it is
probed as after a start.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, TypeAlias, cast, get_args

import msgspec
from msgspec import Struct

from omni_proxy.api_keys.caller_limits import RateRows
from omni_proxy.config.fields import Role
from omni_proxy.fleet.cordon_reasons import LAUNCH_CORDON, PAUSED, UNCERTAIN
from omni_proxy.fleet.health_state import HealthRecord
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import ReportedRole, Worker
from omni_proxy.launch.child_process import ReplicaRecord
from omni_proxy.multiprocess.shared_memory.sessions import SharedRows
from omni_proxy.picker.reservations import ReservationRecord
from omni_proxy.shared.decoding import MALFORMED

FORMATS: Final = (1, 3)  # formats that this program reads and writes
WITH_TREES: Final = 3


class WorkerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker, by its URL. `cordons`: its cordon reasons. Counters: by traffic class."""

    url: str
    health: HealthRecord = HealthRecord()
    registered_at: datetime | None = None
    disabled_changed_at: datetime | None = None
    cordons: tuple[str, ...] = ()
    weight_label: str | None = None
    weight_epoch: int = 0
    instance: str = ""
    hop_line: str = ""
    reported_role: str = ""
    reported_ranks: int = 0
    reported_adapters: tuple[str, ...] = ()
    reported_bootstrap_port: int | None = None
    routed: dict[str, int] = {}
    succeeded: dict[str, int] = {}
    failed: dict[str, int] = {}


class ListenerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The listening sockets, in the order of their descriptors.

    `addresses`: as configured. The sockets of processes follow, by `slots`. `group`: the slots that
    listen, in the kernel's order. `steered`: the indexes that connections are steered to.
    """

    addresses: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    steered: tuple[int, ...] = ()


class CallerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A caller's use of its rate limits: counts by bucket number of CLOCK_MONOTONIC."""

    requests: RateRows = ()
    tokens: RateRows = ()


class HandoverState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole state at one moment. `format`: FORMATS[0], or WITH_TREES. `saved`: a state file.

    `launch`: the [[launch]] entries of the command line. `replicas`: running launched replicas; the
    descriptors of the process and output of each follow those of the sockets. `sessions`: key, URL
    of worker or rank, last use (CLOCK_MONOTONIC), oldest first; `pool_sessions`: the same by role;
    `shared_sessions`: of several processes; `response_owners`: the same for stored responses.
    `callers`: by name. `tree_files`: indexes of processes (0: the main one) whose prefix trees are
    in the last descriptors; `tree_seed`: seed of their hashes.
    """

    format: int = FORMATS[0]
    version: str = ""
    listeners: ListenerRecord = ListenerRecord()
    saved: str = ""
    launch: tuple[dict[str, Any], ...] = ()
    workers: tuple[WorkerRecord, ...] = ()
    replicas: tuple[ReplicaRecord, ...] = ()
    sessions: tuple[tuple[str, str, float], ...] = ()
    pool_sessions: dict[Role, tuple[tuple[str, str, float], ...]] = {}
    shared_sessions: SharedRows | None = None
    response_owners: tuple[tuple[str, str, float], ...] = ()
    shared_response_owners: SharedRows | None = None
    callers: dict[str, CallerRecord] = {}
    tree_files: tuple[int, ...] = ()
    tree_seed: int | None = None


class StartedMessage(Struct, frozen=True, tag="started", tag_field="kind"):
    """The new program's first message: its configuration is valid. `formats`: it can read these."""

    formats: tuple[int, ...]
    version: str = ""


class StateMessage(Struct, frozen=True, tag="state", tag_field="kind"):
    """The running program's reply; the descriptors follow."""

    state: HandoverState


class ReadyMessage(Struct, frozen=True, tag="ready", tag_field="kind"):
    """The new program accepts connections. `admin_socket`: path of its admin API's socket."""

    pid: int
    admin_socket: str


class CommitMessage(Struct, frozen=True, tag="commit", tag_field="kind"):
    """From here on only the new program makes changes. `reservations`: the picker's."""

    reservations: tuple[ReservationRecord, ...] = ()


class CloseIdleMessage(Struct, frozen=True, tag="hurry", tag_field="kind"):
    """The new program's request to close idle connections."""


Message: TypeAlias = StartedMessage | StateMessage | ReadyMessage | CommitMessage | CloseIdleMessage

_encoder: Final = msgspec.json.Encoder()
_decoder: Final[msgspec.json.Decoder[Message]] = msgspec.json.Decoder(Message)


class UnreadableMessage(Exception):
    """The other program's message can't be decoded."""


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(text: bytes) -> Message:
    """Raises UnreadableMessage."""
    try:
        return _decoder.decode(text)
    except MALFORMED as error:
        raise UnreadableMessage(str(error)) from None


# The state journal restores the first two, the launcher the third.
KEPT_CORDONS: Final = frozenset((UNCERTAIN, PAUSED, LAUNCH_CORDON))


def worker_records(fleet: Fleet) -> tuple[WorkerRecord, ...]:
    return tuple(map(_record, fleet.workers))


def _record(worker: Worker) -> WorkerRecord:
    return WorkerRecord(
        url=worker.url,
        health=worker.health.record(),
        registered_at=worker.registered_at,
        disabled_changed_at=worker.disabled_changed_at,
        cordons=tuple(sorted(worker.cordon_reasons)),
        weight_label=worker.weight_version.label,
        weight_epoch=worker.weight_version.epoch,
        instance=worker.instance,
        hop_line=worker.hop_line.decode("latin-1"),
        reported_role=worker.reported_role,
        reported_ranks=worker.reported_ranks,
        reported_adapters=worker.reported_adapters,
        reported_bootstrap_port=worker.reported_bootstrap_port,
        routed=worker.routed,
        succeeded=worker.succeeded,
        failed=worker.failed,
    )


def missing_workers(fleet: Fleet, records: Iterable[WorkerRecord]) -> list[str]:
    """URLs of routable workers that are not in the fleet."""
    return [
        record.url for record in records if not record.cordons and fleet.find(record.url) is None
    ]


def restore_workers(fleet: Fleet, records: Iterable[WorkerRecord]) -> int:
    """Restore workers; return how many were found in the fleet."""
    count = 0
    for record in records:
        worker = fleet.find(record.url)
        if worker is not None:
            count += 1
            _restore(fleet, worker, record)
    return count


def _restore(fleet: Fleet, worker: Worker, record: WorkerRecord) -> None:
    worker.registered_at = record.registered_at or worker.registered_at
    worker.disabled_changed_at = record.disabled_changed_at or worker.disabled_changed_at
    classes = {**record.routed, **record.succeeded, **record.failed}
    for traffic in classes:
        worker.add_counts(
            traffic,
            routed=record.routed.get(traffic, 0),
            succeeded=record.succeeded.get(traffic, 0),
            failed=record.failed.get(traffic, 0),
        )
    if not KEPT_CORDONS.issuperset(record.cordons):
        return
    worker.health.restore(record.health)
    worker.instance = record.instance
    worker.hop_line = record.hop_line.encode("latin-1")
    if record.reported_role in get_args(ReportedRole):
        worker.report_role(cast("ReportedRole", record.reported_role))
    worker.report_adapters(record.reported_adapters)
    worker.report_bootstrap_port(record.reported_bootstrap_port)
    fleet.set_version(worker, record.weight_label, record.weight_epoch)
    fleet.report_ranks(worker, record.reported_ranks)
    fleet.restored(worker)
