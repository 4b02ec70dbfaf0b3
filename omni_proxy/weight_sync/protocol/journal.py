"""What must outlive the program: the operation that is under way, and who is uncertain.

    at the start        nothing is known of            because
    operation begun     its targets                    we ended in its middle
    sync, from arming   its members                    their receivers may have gone on
    uncertain workers   them                           the reason of then
    unreadable          everybody                      anything may have been under way
Whom a trainer had paused stays paused: its engine is, too.

Invariant: a record is written before the first call of its operation leaves, and cleared only after
every worker's fate is settled. So whatever the record does not name was not touched.
"""

from __future__ import annotations

import json

import msgspec
from msgspec import Struct

FORMAT = 1
# In these a member of a sync has nothing yet that it had not before.
HARMLESS = ("joining", "grouped")


class JournalEntry(Struct, frozen=True, kw_only=True):
    """The operation that is under way; `begun_at` is an ISO time."""

    operation: str
    path: str
    targets: tuple[str, ...]
    begun_at: str
    step: str


class PauseRecord(Struct, frozen=True, kw_only=True):
    """Why an engine stands still: `at` is an ISO time, `by` names the caller, `path` is its call.

    `instance`: the process that was paused, where it names itself; another one runs.
    """

    at: str = ""
    by: str = ""
    path: str = ""
    mode: str = ""
    instance: str = ""

    def in_words(self) -> str:
        by = f" by {self.by}" if self.by else ""
        since = f" since {self.at}" if self.at else ""
        return f"paused{since}{by}" + (f" (POST {self.path})" if self.path else "")

    def told(self) -> dict[str, str | None]:
        """JSON-ready; null for what is not known."""
        return {name: getattr(self, name) or None for name in ("at", "by", "path", "mode")}


class Journal(Struct, frozen=True, kw_only=True):
    """`uncertain`: worker URL to reason; `paused`: URLs that are out until they continue.

    `pauses`: worker URL to what has its engine stand still, whether it is held for that or not.
    `sync`: a grouped sync, which lasts longer than any one operation of it.
    """

    format: int = FORMAT
    begun: JournalEntry | None = None
    sync: JournalEntry | None = None
    uncertain: dict[str, str] = {}
    paused: tuple[str, ...] = ()
    pauses: dict[str, PauseRecord] = {}

    def __bool__(self) -> bool:
        under_way = self.begun is not None or self.sync is not None
        return under_way or bool(self.uncertain or self.paused or self.pauses)

    def at_start(self) -> dict[str, str]:
        """Who is uncertain when the program starts with this record, and why."""
        found: dict[str, str] = {}
        for begun in (self.begun, self.sync):
            if begun is not None and begun.step not in HARMLESS:
                reason = (
                    f"the proxy ended while {begun.path.removeprefix('/')} was under way "
                    f"(begun {begun.begun_at}, step {begun.step})"
                )
                found |= dict.fromkeys(begun.targets, reason)
        return {**found, **self.uncertain}


class UnreadableJournal(ValueError):
    """Whoever reads on would have to guess."""


def encode(journal: Journal) -> bytes:
    return msgspec.json.format(readable_json(journal), indent=2) + b"\n"


def readable_json(record: Struct) -> bytes:
    """JSON that `decode` takes, also of half a character, which JSON of a trainer or of a worker
    can spell: it becomes a question mark."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(record), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def decode(raw: bytes) -> Journal:
    """Raises UnreadableJournal."""
    try:
        journal = msgspec.json.decode(raw, type=Journal)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableJournal(str(error)) from None
    if journal.format != FORMAT:
        raise UnreadableJournal(f"format {journal.format} is not known")
    return journal
