"""Resolves selectors to workers, by the fleet's records and by facts that engines report.

Invariant: engines are called only if a selector has a key that only they report; a worker that does
not reply has none of these facts.
"""

from __future__ import annotations

from collections.abc import Mapping

import trio

from omni_proxy.admin_api.serializers.worker_records import WorkerRecords
from omni_proxy.admin_ops.engine_dialects import SERVER_INFO
from omni_proxy.admin_ops.selector import Selector, SelectorError, parse_selector
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.upstream_http.client import Call, broadcast
from omni_proxy.wire.errors import HttpError

# Keys of a selector or of /v1/rl/workers, and where /server_info has them.
ENGINE_FACTS = {
    "engine": "engine",
    "engine_version": "version",
    "tp_size": "tp_size",
    "dp_size": "dp_size",
    "pp_size": "pp_size",
}
DEFAULT_ENGINE = "sglang"
Facts = dict[str, str]


class SelectorResolver:
    def __init__(self, fleet: Fleet, config_store: ConfigStore, records: WorkerRecords) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._records = records

    async def urls(self, text: str | None) -> frozenset[str] | None:
        """URLs of the selected workers, None without a selector. Raises HttpError 400 for an
        invalid one."""
        if text is None:
            return None
        try:
            selector = parse_selector(text)
        except SelectorError as error:
            raise HttpError(
                400, f"selector: {error}", "invalid_selector", offset=error.offset
            ) from None
        workers = self._fleet.workers
        reported = await self.engine_facts(workers) if _asks_engines(selector) else {}
        return frozenset(
            worker.url
            for worker in workers
            if selector.matches(self._facts(worker) | reported.get(worker.url, {}))
        )

    async def engine_facts(self, workers: list[Worker]) -> dict[str, Facts]:
        """The facts that engines report, by worker URL; without engines that do not answer."""
        alive = [worker for worker in workers if worker.health.state is not Health.DEAD]
        secs = self._config_store.config.health.timeout_secs
        results = await broadcast(alive, Call("GET", SERVER_INFO, timeout_secs=secs))
        reported = {}
        for result in results:
            await trio.lowlevel.checkpoint()  # a response may take milliseconds to parse
            info = result.json() if result.ok else None
            if isinstance(info, dict):
                reported[result.worker.url] = _engine_facts(info)
        return reported

    def _facts(self, worker: Worker) -> Facts:
        record = self._records.record(worker)
        labels = record["labels"]
        facts = {
            "id": worker.id,
            "url": worker.url,
            "model": worker.model or "",
            "worker_type": worker.role,
            "role": worker.role,
            "health": worker.health.state.value,
            "weight_version": worker.weight_label or "",
        }
        return {**_texts(labels if isinstance(labels, dict) else {}), **facts}


def _asks_engines(selector: Selector) -> bool:
    return any(term.key in ENGINE_FACTS for term in selector.terms)


def _engine_facts(info: Mapping[str, object]) -> Facts:
    values = {key: info.get(name) for key, name in ENGINE_FACTS.items()}
    return {"engine": DEFAULT_ENGINE, **_texts(values)}


def _texts(reported: Mapping[str, object]) -> Facts:
    return {str(key): str(value) for key, value in reported.items() if value is not None}
