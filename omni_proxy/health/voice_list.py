"""The voice list: asks the worker that keeps the uploaded voices for their names.

Invariant: what the registry knows is on the disk before the next reading, so that it survives a
restart. A failed reading leaves what was known; it is tried again, and is shown at GET /health.
Source: omni-router.md 13 (GET /v1/audio/voices?names_only=true, at most 1 MiB).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final

import trio

from omni_proxy.backoff import Backoff
from omni_proxy.config.state import SavedVoices
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voices import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, CallResult, call_worker

_log = logging.getLogger(__name__)

TARGET: Final = "/v1/audio/voices?names_only=true"
MAX_BYTES: Final = 1024 * 1024
MAX_NAMES: Final = 10_000
TIMEOUT_SECS: Final = 10.0
RETRY_SECS: Final = 1.0  # after a failed reading, doubling
MAX_RETRY_SECS: Final = 30.0
REFRESH_SECS: Final = 30.0  # a voice may be uploaded or deleted at the worker itself

Remember = Callable[[SavedVoices], Awaitable[None]]


class VoiceList:
    """`remember` puts owner and names on the disk."""

    def __init__(self, fleet: Fleet, registry: VoiceRegistry, remember: Remember) -> None:
        self._fleet = fleet
        self._registry = registry
        self._remember = remember
        self._changed = trio.Event()
        registry.watch(lambda: self._changed.set())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        backoff = Backoff(RETRY_SECS, MAX_RETRY_SECS)
        while True:
            self._changed = trio.Event()
            await self._save()
            pause_secs = inf
            if self._registry.owner:
                owner = self._fleet.find(self._registry.owner)  # a launched one comes later
                if owner is not None and await self._read(owner):
                    await self._save()
                    backoff.reset()
                    pause_secs = REFRESH_SECS
                else:
                    pause_secs = backoff.next_delay()
            with trio.move_on_after(pause_secs):
                await self._changed.wait()

    async def _read(self, owner: Worker) -> bool:
        """Whether the registry has the newest list now."""
        generation = self._registry.generation
        call = Call("GET", TARGET, timeout_secs=TIMEOUT_SECS, max_bytes=MAX_BYTES)
        outcome = await call_worker(owner, call)
        try:
            names = names_of(outcome)
        except ValueError as error:
            if self._registry.refresh_error != str(error):
                _log.warning("the uploaded voices of %s could not be listed: %s", owner.url, error)
            self._registry.fail(generation, str(error))
            return False
        return self._registry.set_names(generation, names)

    async def _save(self) -> None:
        """Unknown names are kept as unknown: the disk must not be older than an upload."""
        names = self._registry.names
        kept = None if names is None else tuple(sorted(names))
        await self._remember(SavedVoices(owner=self._registry.owner, names=kept))


def names_of(outcome: CallResult) -> list[str]:
    """The names in a worker's answer. Raises ValueError that says why there are none."""
    if outcome.status in ROUTE_ABSENT:
        return []
    if not outcome.ok:
        raise ValueError(outcome.failure)
    told = outcome.json()
    if not isinstance(told, dict):
        raise ValueError("the answer is no JSON object")
    names = told.get("uploaded_voice_names")
    if names is None:
        voices = told.get("uploaded_voices", [])
        names = [each.get("name") for each in _listed(voices) if isinstance(each, dict)]
    texts = [name for name in _listed(names) if isinstance(name, str)]
    found = [name for name in texts if name and name.isprintable()]
    if len(found) > MAX_NAMES:
        raise ValueError(f"{len(found)} names, more than {MAX_NAMES}")
    return found


def _listed(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError("the names are no list")
    return value
