"""What one program hands over to the next, as JSON: the form of docs/upgrade.md.

Invariant: what a reader does not know is ignored, and what is missing has a default, so a record
may get further fields under the same number. A change that an older reader would misread needs
another number: 3 has further descriptors, of files with prefix trees; 2 had another form of those.
Pure.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from omni_proxy.api_keys.caller import RateRows
from omni_proxy.config.fields import Role
from omni_proxy.fleet.health_state import HealthRecord
from omni_proxy.launch.handed_replica import ReplicaRecord
from omni_proxy.multiprocess.shared_memory.sessions import SharedRows
from omni_proxy.picker.reservations import ReservationRecord

FORMATS: Final = (1, 3)  # that this program reads and writes
WITH_TREES: Final = 3


class WorkerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker, by its URL. `cordons`: why it was held; counters are by traffic class."""

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
    """The addresses of the listening sockets, as configured, in the order of their descriptors;
    then come those of the processes: their slots, which of them listen in the order of the kernel,
    and the indexes that connections are steered to."""

    addresses: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    steered: tuple[int, ...] = ()


class CallerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a caller has taken of its rates: numbers of buckets by CLOCK_MONOTONIC, and counts."""

    requests: RateRows = ()
    tokens: RateRows = ()


class HandoverState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything, at one moment. `format`: FORMATS[0], or WITH_TREES. `saved`: the text of a state
    file. `launch`: the [[launch]] entries of the command line. `replicas`: launched ones that run;
    of each come the descriptors of process and output, behind those of the sockets. `sessions`:
    key, URL of the worker or rank, and last use by CLOCK_MONOTONIC, oldest first; those of pools by
    role, and all of several processes as `shared_sessions`; `response_owners`: the workers of
    stored responses alike. `callers`: by name. `tree_files`: the indexes of processes, 0 for the
    main one, whose prefix trees are in the last descriptors; `tree_seed`: of the hashes in them."""

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
    """The new program's first message: its configuration is valid. `formats` that it can read."""

    formats: tuple[int, ...]
    version: str = ""


class StateMessage(Struct, frozen=True, tag="state", tag_field="kind"):
    """The running program's answer; the descriptors follow."""

    state: HandoverState


class ReadyMessage(Struct, frozen=True, tag="ready", tag_field="kind"):
    """The new program accepts connections. `admin_socket`: the path of its admin API."""

    pid: int
    admin_socket: str


class CommitMessage(Struct, frozen=True, tag="commit", tag_field="kind"):
    """From here on the new program is the one that changes things. `reservations`: of the picker,
    which change up to this moment."""

    reservations: tuple[ReservationRecord, ...] = ()


class CloseIdleMessage(Struct, frozen=True, tag="hurry", tag_field="kind"):
    """From the new program: close idle connections now."""


Message: TypeAlias = StartedMessage | StateMessage | ReadyMessage | CommitMessage | CloseIdleMessage

_encoder: Final = msgspec.json.Encoder()
_decoder: Final[msgspec.json.Decoder[Message]] = msgspec.json.Decoder(Message)


class UnreadableMessage(Exception):
    """The other program's message has another form."""


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(text: bytes) -> Message:
    """Raises UnreadableMessage."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableMessage(str(error)) from None
