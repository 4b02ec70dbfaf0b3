"""Changes of workers over HTTP, one value for each URL: its part of the saved state. Pure.

Invariant: `with_change(state, change)` has for the change's URL exactly the entries of the state
that the change was made from, and for all other URLs those of `state`. Voices are not included.
Changes of a URL are ordered by the store's revisions: the last writer wins. A change is validated
as strictly as a saved state at the start, because its value in the store may not be a proxy's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from omni_proxy.config.problem import ConfigError
from omni_proxy.config.state import (
    DisabledBy,
    SavedState,
    StateWorker,
    WorkerOverride,
    read_state,
    render_state,
)
from omni_proxy.config.url import normalize_url
from omni_proxy.shared.decoding import MALFORMED

Value = TypeVar("Value")

# KEYS: changes by URL. ARGV: URL, revision, change, channel, message. Returns 1 if it was stored
# as the newest change.
PUT: Final = """
local known = redis.call('HGET', KEYS[1], ARGV[1])
local newest = known and string.match(known, '^(%d+):')
if newest and #newest <= 18 and tonumber(newest) >= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ':' .. ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[5])
return 1
"""


class WorkerChange(Struct, frozen=True, kw_only=True):
    """`added`: a worker added over HTTP. `switch`: overrides a worker of another source.

    `tombstone`: set for a deleted worker. `leaves`: it is deleted once it is drained. Without any
    of these the worker is as its other sources define it.
    """

    url: str
    added: StateWorker | None = None
    switch: WorkerOverride | None = None
    tombstone: str = ""
    leaves: bool = False
    disabled_by: DisabledBy | None = None


_decoder: Final = msgspec.msgpack.Decoder(WorkerChange)
_REVISION: Final = re.compile(rb"[0-9]{1,18}\Z")


def encode_change(change: WorkerChange) -> bytes:
    return msgspec.msgpack.encode(change)


def decode_change(payload: bytes) -> WorkerChange | None:
    """Decode a change; None if this release can't, or if a saved state can't have it."""
    try:
        change = _decoder.decode(payload)
    except MALFORMED:
        return None
    return change if _is_allowed(change) else None


def _is_allowed(change: WorkerChange) -> bool:
    """Whether an added worker has the change's URL, and a saved state may contain the change."""
    if change.added is not None and change.added.url != change.url:
        return False
    state = with_change(SavedState(), replace(change, tombstone=""))
    try:
        return (
            normalize_url(change.url, allow_unix=True) == change.url
            and read_state(render_state(state), "the store") == state
        )
    except (ValueError, ConfigError):
        return False


def split_stored(value: bytes) -> tuple[int, WorkerChange | None]:
    """The revision and the change in a value that PUT has stored."""
    revision, _, payload = value.partition(b":")
    return (int(revision), decode_change(payload)) if _REVISION.match(revision) else (0, None)


def change_of(state: SavedState, url: str) -> WorkerChange:
    added = [worker for worker in state.workers if worker.url == url]
    return WorkerChange(
        url=url,
        added=added[0] if added else None,
        switch=state.switches.get(url),
        tombstone=state.tombstones.get(url, ""),
        leaves=url in state.leaving,
        disabled_by=state.disabled_by.get(url),
    )


def changes_between(before: SavedState, after: SavedState) -> Iterator[WorkerChange]:
    """A change for each URL for which the states differ."""
    for url in dict.fromkeys((*_urls(before), *_urls(after))):
        change = change_of(after, url)
        if change != change_of(before, url):
            yield change


def with_change(state: SavedState, change: WorkerChange) -> SavedState:
    url = change.url
    return replace(
        state,
        workers=tuple(_workers(state, change)),
        switches=_with(state.switches, url, change.switch),
        tombstones=_with(state.tombstones, url, change.tombstone or None),
        leaving=tuple(
            dict.fromkeys((*(u for u in state.leaving if u != url), *([url] * change.leaves)))
        ),
        disabled_by=_with(state.disabled_by, url, change.disabled_by),
    )


def _workers(state: SavedState, change: WorkerChange) -> Iterator[StateWorker]:
    """The workers with the change applied; a changed worker keeps its position."""
    replaced = False
    for worker in state.workers:
        if worker.url != change.url:
            yield worker
        elif change.added is not None:
            replaced = True
            yield change.added
    if change.added is not None and not replaced:
        yield change.added


def _with(table: dict[str, Value], url: str, value: Value | None) -> dict[str, Value]:
    rest = {key: known for key, known in table.items() if key != url}
    return rest if value is None else rest | {url: value}


def _urls(state: SavedState) -> Iterator[str]:
    yield from (worker.url for worker in state.workers)
    for table in (state.switches, state.tombstones, state.disabled_by):
        yield from table
    yield from state.leaving
