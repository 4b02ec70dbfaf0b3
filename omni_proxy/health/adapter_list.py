"""Reads which adapters engines have loaded, for workers with `loras = "auto"`.

A worker's /v1/models is read when it gets healthy, when another process answers under its URL,
after a call that loads or unloads an adapter has passed through the proxy, and every half a minute,
since an adapter may be loaded at the engine itself. Invariant: a failed read keeps the names that
are known, and is repeated.
Sources: vLLM and SGLang list an adapter with its base model as `parent`; vLLM takes the adapter's
name as the model, SGLang only `model:adapter` or `lora_path` (a bare name there gets the base
model's answer).
"""

from __future__ import annotations

import logging
from typing import Final, TypeGuard

import trio

from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker, adapter_names
from omni_proxy.upstream_http.client import Call, CallResult, call_worker
from omni_proxy.wire.bounded_json import TooManyValues, read_json

_log = logging.getLogger(__name__)

PATH: Final = "/v1/models"
MAX_BYTES: Final = 4 * 1024 * 1024
MAX_ADAPTERS: Final = 1000  # of one worker
MAX_NAME_CHARS: Final = 1024
TIMEOUT_SECS: Final = 5.0
RETRY_SECS: Final = 1.0
REFRESH_SECS: Final = 30.0
PARALLEL: Final = 64


class AdapterList:
    """`run` reads; `refresh` reads now."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._due: set[Worker] = set()
        self._changed = trio.Event()
        self._slots = trio.CapacityLimiter(PARALLEL)
        fleet.watch_health(lambda worker, before: self._note(worker))
        fleet.watch_cache_cleared(self._note)
        fleet.watch_members(self._follow_members)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        self._due.update(self._automatic())
        while True:
            self._changed = trio.Event()
            due, self._due = self._due, set()
            failed = await self._read_all(due)
            self._due |= failed
            with trio.move_on_after(RETRY_SECS if failed else REFRESH_SECS) as waited:
                await self._changed.wait()
            if waited.cancelled_caught and not failed:
                self._due.update(self._automatic())

    async def refresh(self) -> None:
        """Read the lists of all workers now: one of them has loaded or unloaded an adapter."""
        self._due |= await self._read_all(set(self._automatic()))

    def _automatic(self) -> list[Worker]:
        return [worker for worker in self._fleet.workers if self._is_wanted(worker)]

    def _is_wanted(self, worker: Worker) -> bool:
        healthy = worker.health.state is Health.HEALTHY
        return worker.loras == "auto" and healthy and self._fleet.find(worker.url) is worker

    def _note(self, worker: Worker) -> None:
        if self._is_wanted(worker):
            self._due.add(worker)
            self._changed.set()

    def _follow_members(self) -> None:
        """A worker may have been switched to "auto"."""
        for worker in self._fleet.workers:
            if not worker.reported_adapters:
                self._note(worker)

    async def _read_all(self, workers: set[Worker]) -> set[Worker]:
        """Returns those that could not be read."""
        failed: set[Worker] = set()

        async def read(worker: Worker) -> None:
            async with self._slots:
                if not await self._read(worker):
                    failed.add(worker)

        async with trio.open_nursery() as nursery:
            for worker in workers:
                if self._is_wanted(worker):
                    nursery.start_soon(read, worker)
        return failed

    async def _read(self, worker: Worker) -> bool:
        call = Call("GET", PATH, timeout_secs=TIMEOUT_SECS, max_bytes=MAX_BYTES)
        names = reported_adapters(await call_worker(worker, call), worker.model)
        if names is None:
            return False
        if self._is_wanted(worker) and names != worker.reported_adapters:
            shown = ",".join(name for name in names if not name.startswith(":")) or "none"
            _log.info("worker_adapters_reported worker=%s adapters=%s", worker.url, shown)
            self._fleet.report_adapters(worker, names)
        return True


def reported_adapters(result: CallResult, model: str | None) -> tuple[str, ...] | None:
    """How requests may name the adapters that a worker's list has; None for no list. `model`: as
    the worker is configured."""
    if not result.ok:
        return None
    try:
        body = read_json(result.body)
    except (TooManyValues, ValueError):
        return None
    cards = body.get("data") if isinstance(body, dict) else None
    if not isinstance(cards, list):
        return None
    names: dict[str, None] = {}
    for card in cards[:MAX_ADAPTERS]:
        if not isinstance(card, dict):
            continue
        lora, parent = card.get("id"), card.get("parent")
        if _is_name(lora) and _is_name(parent):
            bare = card.get("owned_by") != "sglang"
            names.update(dict.fromkeys(adapter_names(lora, (parent, model), bare=bare)))
    return tuple(names)


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS and value.isprintable()
