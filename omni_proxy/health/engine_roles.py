"""Reads whether an engine serves the prefill or the decode leg of requests, and its bootstrap port,
where they are not configured.

While the fleet has prefill or decode workers, a worker without a role gets no request until its
engine was asked once: a regular request would fail at an engine that serves one leg. Invariant:
what can't be asked is regular.
Source: features.md 2.1 (`disaggregation_mode` and `disaggregation_bootstrap_port` of SGLang's
/server_info).
"""

from __future__ import annotations

import logging
from typing import Final

from omni_proxy.fleet.cordons import ROLE_CORDON
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import ReportedRole, Worker
from omni_proxy.health.engine_pages import SERVER_INFO, Fetch, PageReader, could_be_asked
from omni_proxy.upstream_http.client import CallResult

_log = logging.getLogger(__name__)

MAX_PORT: Final = 65535


class EngineRoles(PageReader):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def wants(self, worker: Worker) -> bool:
        return not worker.configured_role or worker.needs_bootstrap_port

    def begin(self, worker: Worker, *, first: bool) -> None:
        if first and self._fleet.has_pools and not worker.configured_role:
            self._fleet.cordon(worker, ROLE_CORDON)

    def end(self, worker: Worker) -> None:
        if ROLE_CORDON in worker.cordon_reasons:
            self._fleet.uncordon(worker, ROLE_CORDON)

    async def read(self, worker: Worker, fetch: Fetch) -> bool:
        result = await fetch(SERVER_INFO)
        if not could_be_asked(result):
            self.end(worker)
            return False
        role = role_of_info(result)
        if role != worker.reported_role:
            _log.info("worker_role worker=%s role=%s", worker.url, role or "regular")
        self._fleet.report_bootstrap_port(worker, bootstrap_port_of_info(result))
        self._fleet.report_role(worker, role)
        return True


def role_of_info(result: CallResult) -> ReportedRole:
    """SGLang's `disaggregation_mode`; "" where it is null, "null", or no such key."""
    mode = _field(result, "disaggregation_mode")
    if mode == "prefill":
        return "prefill"
    return "decode" if mode == "decode" else ""


def bootstrap_port_of_info(result: CallResult) -> int | None:
    """SGLang's `disaggregation_bootstrap_port`; None where it is no port, or there is none."""
    port = _field(result, "disaggregation_bootstrap_port")
    if not isinstance(port, int) or isinstance(port, bool):
        return None
    return port if 1 <= port <= MAX_PORT else None


def _field(result: CallResult, name: str) -> object:
    body = result.json() if result.ok else None
    return body.get(name) if isinstance(body, dict) else None
