"""The LoRA adapters that an engine lists, and the names by which requests may use them.

Invariants: with `loras = "auto"` a failed read keeps the previous names. Adapters are read again
after a call that loads or unloads one, and every half minute.
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
    """Both engines list an adapter with its base model as `parent`. vLLM takes the adapter as the
    model, SGLang only `model:adapter` or `lora_path`."""

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
    """The names by which requests may use the adapters in a worker's list; None without a list.
    `model`: the worker's configured model."""
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
