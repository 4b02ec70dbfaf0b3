"""Reads which adapters engines have loaded, for workers with `loras = "auto"`.

The list is also read after a call that loads or unloads an adapter has passed through the proxy,
and every half a minute, since an adapter may be loaded at the engine itself. Invariant: a failed
read keeps the names that are known.
Sources: vLLM and SGLang list an adapter with its base model as `parent`; vLLM takes the adapter's
name as the model, SGLang only `model:adapter` or `lora_path` (a bare name there gets the base
model's answer).
"""

from __future__ import annotations

import logging
from typing import Final, TypeGuard

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker, adapter_names
from omni_proxy.health.engine_pages import MODELS, Fetch, PageReader
from omni_proxy.upstream_http.client import CallResult
from omni_proxy.wire.bounded_json import TooManyValues, read_json

_log = logging.getLogger(__name__)

MAX_ADAPTERS: Final = 1000  # of one worker
MAX_NAME_CHARS: Final = 1024
REFRESH_SECS: Final = 30.0


class AdapterList(PageReader):
    refresh_secs = REFRESH_SECS

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def wants(self, worker: Worker) -> bool:
        return worker.loras == "auto"

    async def read(self, worker: Worker, fetch: Fetch) -> bool:
        names = reported_adapters(await fetch(MODELS), worker.model)
        if names is None:
            return False
        if names != worker.reported_adapters:
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
