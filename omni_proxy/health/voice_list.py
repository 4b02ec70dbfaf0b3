"""The voice list: reads the names of uploaded voices from the worker that stores them.

Invariant: the registry is saved before the next read, so it survives a restart. A failed
read keeps the known names; it is retried with back-off, and GET /health shows its error.
Source: note:omni-router 13 (GET /v1/audio/voices?names_only=true, at most 1 MiB).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final

import trio

from omni_proxy.config.state import SavedVoices
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.engine_pages import MAX_RETRY_SECS, RETRY_SECS, CallWorker
from omni_proxy.shared.backoff import Backoff
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, CallResult, call_worker

_log = logging.getLogger(__name__)

TARGET: Final = "/v1/audio/voices?names_only=true"
MAX_BYTES: Final = 1024 * 1024
MAX_NAMES: Final = 10_000
TIMEOUT_SECS: Final = 10.0
REFRESH_SECS: Final = 30.0  # a voice may be uploaded or deleted at the worker itself

SaveVoices = Callable[[SavedVoices], Awaitable[None]]


class VoiceList:
    """Keeps the registry up to date; `save` writes the owner and the names to disk. `call`: makes a
    call to a worker."""

    def __init__(
        self,
        fleet: Fleet,
        registry: VoiceRegistry,
        save: SaveVoices,
        call: CallWorker = call_worker,
    ) -> None:
        self._call_worker = call
        self._fleet = fleet
        self._registry = registry
        self._save_voices = save
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
                owner = self._fleet.find(self._registry.owner)  # a launched worker is added later
                if owner is not None and await self._read(owner):
                    await self._save()
                    backoff.reset()
                    pause_secs = REFRESH_SECS
                else:
                    pause_secs = backoff.next_delay()
            with trio.move_on_after(pause_secs):
                await self._changed.wait()

    async def _read(self, owner: Worker) -> bool:
        """Read the names; returns whether the registry has the newest list now."""
        generation = self._registry.generation
        call = Call("GET", TARGET, timeout_secs=TIMEOUT_SECS, max_bytes=MAX_BYTES)
        result = await self._call_worker(owner, call)
        try:
            names = parse_voice_names(result)
        except ValueError as error:
            if self._registry.refresh_error != str(error):
                _log.warning("voice_list_failed worker=%s error=%s", owner.url, error)
            self._registry.refresh_failed(generation, str(error))
            return False
        return self._registry.set_names(generation, names)

    async def _save(self) -> None:
        """Save the registry, also if the names are unknown, so that a restart does not load a list
        that is older than an upload."""
        names = self._registry.names
        saved = None if names is None else tuple(sorted(names))
        await self._save_voices(SavedVoices(owner=self._registry.owner, names=saved))


def parse_voice_names(result: CallResult) -> list[str]:
    """The names in a worker's response. Raises ValueError with the reason if it has none."""
    if result.status in ROUTE_ABSENT:
        return []
    if not result.ok:
        raise ValueError(result.failure)
    body = result.json()
    if not isinstance(body, dict):
        raise ValueError("the answer is not a JSON object")
    names = body.get("uploaded_voice_names")
    if names is None:
        voices = _require_list(body.get("uploaded_voices", []))
        names = [voice.get("name") for voice in voices if isinstance(voice, dict)]
    strings = [name for name in _require_list(names) if isinstance(name, str)]
    printable = [name for name in strings if name and name.isprintable()]
    if len(printable) > MAX_NAMES:
        raise ValueError(f"{len(printable)} names, more than {MAX_NAMES}")
    return printable


def _require_list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError("the names are not a list")
    return value
