"""Format of the journal on disk, and which workers are uncertain if a start finds it. Pure.

    found at the start  uncertain                      because
    operation begun     its targets                    the proxy ended during the operation
    sync, from arming   its participants               their receivers may have continued
    uncertain workers   these workers                  the recorded reason
    rollout             workers being changed          the proxy ended; the rollout continues
    unreadable          all workers                    anything may have been in progress
A paused worker stays paused, because its engine still is. `state_journal` decides what is recorded
and when. Invariant: a record is written before the first call of its operation and cleared only
after every worker's outcome is decided. So a worker that isn't in the record was not touched.
"""

from __future__ import annotations

import json

import msgspec
from msgspec import Struct, field

from omni_proxy.shared.decoding import decode_json_record
from omni_proxy.weight_sync.protocol.rollout_state_machine import RolloutState, WorkerPhase

FORMAT = 1
# In these steps of a sync no participant has new weights yet.
HARMLESS_STEPS = ("joining", "grouped")


class JournalEntry(Struct, frozen=True, kw_only=True):
    """An operation in progress; `begun_at` is an ISO time."""

    operation: str
    path: str
    targets: tuple[str, ...]
    begun_at: str
    step: str


class PauseRecord(Struct, frozen=True, kw_only=True):
    """Why an engine is paused: `at` is an ISO time, `by` names the caller, `path` is its call.

    `instance`: the process that was paused, if it reports one. A new instance is not paused.
    """

    at: str = ""
    by: str = ""
    path: str = ""
    mode: str = ""
    instance: str = ""

    def describe(self) -> str:
        by = f" by {self.by}" if self.by else ""
        since_text = f" since {self.at}" if self.at else ""
        return f"paused{since_text}{by}" + (f" (POST {self.path})" if self.path else "")


class Journal(Struct, frozen=True, kw_only=True):
    """The whole record. `uncertain`: worker URL to reason. `paused`: URLs cordoned until resumed.

    `pauses`: worker URL to the record of its pause, cordoned for it or not.
    `sync`: the weight sync with a trainer's group; it lasts longer than each of its operations.
    `rollout`: a rollout that has not ended; it continues at the next start.
    """

    format: int = FORMAT
    in_progress: JournalEntry | None = field(default=None, name="begun")
    sync: JournalEntry | None = None
    rollout: RolloutState | None = None
    uncertain: dict[str, str] = {}
    paused: tuple[str, ...] = ()
    pauses: dict[str, PauseRecord] = {}

    def __bool__(self) -> bool:
        running = (self.in_progress, self.sync, self.rollout) != (None, None, None)
        return running or bool(self.uncertain or self.paused or self.pauses)

    def uncertain_at_start(self) -> dict[str, str]:
        """URLs to reasons of workers that are uncertain if the proxy starts with this record."""
        reasons: dict[str, str] = {}
        for entry in (self.in_progress, self.sync):
            if entry is not None and entry.step not in HARMLESS_STEPS:
                reason = (
                    f"the proxy ended while {entry.path.removeprefix('/')} was under way "
                    f"(begun {entry.begun_at}, step {entry.step})"
                )
                reasons |= dict.fromkeys(entry.targets, reason)
        if self.rollout is not None:
            changing = (WorkerPhase.UPDATING, WorkerPhase.RESTORING)
            reason = f"{self.rollout.name}: the proxy ended while it was being updated"
            reasons |= dict.fromkeys(self.rollout.urls(*changing), reason)
        return {**reasons, **self.uncertain}


class UnreadableJournal(ValueError):
    """The file is damaged, or of an unknown format."""


def encode(journal: Journal) -> bytes:
    return msgspec.json.format(readable_json(journal), indent=2) + b"\n"


def readable_json(record: Struct) -> bytes:
    """JSON that `decode` can read.

    A lone surrogate, from a JSON escape of a trainer or a worker, becomes a question mark.
    """
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(record), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def decode(raw: bytes) -> Journal:
    """Raises UnreadableJournal."""
    return decode_json_record(raw, Journal, FORMAT, UnreadableJournal)
