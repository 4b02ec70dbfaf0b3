"""GET /history: series of the last hours as JSON, for charts."""

from __future__ import annotations

import time
from typing import Final

import trio
from quart import Quart, Response, request

from omni_proxy.admin_api.fleet_changes import find_worker
from omni_proxy.admin_api.responses import json_response
from omni_proxy.fleet.registry import Fleet
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.telemetry.history import SERIES, STEPS, History, Track, start_of
from omni_proxy.wire.errors import bad_request

HISTORY_SECS: Final = tuple(sorted(STEPS))


class HistoryRoutes:
    """Series of the last hours as JSON, for charts."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore, history: History) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._history = history

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/history", "history", self.show)

    async def show(self) -> Response:
        secs = _range(request.args.get("secs", str(HISTORY_SECS[0])))
        names = _series(request.args.get("series"))
        history, now = self._history, time.time()
        body: dict[str, object] = {
            "secs": secs,
            "step_secs": STEPS[secs],
            "from": start_of(secs, now),
            "metrics": self._config_store.config.server.metrics,
        }
        if request.args.get("by") == "worker":
            rows: list[dict[str, object]] = []
            for worker in self._fleet.workers:
                if (of_worker := history.workers.get(worker)) is not None:
                    row = {name: of_worker.read(secs, name, now) for name in names}
                    rows.append({"id": worker.id, "url": worker.url, "series": row})
                await trio.lowlevel.checkpoint()
            return json_response({**body, "workers": rows})
        if "by" in request.args:
            raise bad_request("by must be worker")
        track = history.fleet
        if (of := request.args.get("of")) is not None:
            if of != "cluster":
                raise bad_request("of must be cluster")
            if history.cluster is None:
                raise bad_request("this proxy is not a member of a cluster")
            track = history.cluster
        if name := request.args.get("worker"):
            worker = find_worker(self._fleet, name)
            track = history.workers.get(worker) or Track()
            body["worker"] = worker.url
        body["series"] = {name: track.read(secs, name, now) for name in names}
        return json_response(body)


def _range(text: str) -> int:
    """Raises HttpError 400."""
    if text not in map(str, HISTORY_SECS):
        raise bad_request(f"secs must be one of {', '.join(map(str, HISTORY_SECS))}")
    return int(text)


def _series(text: str | None) -> tuple[str, ...]:
    """The named series; all without a text. Raises HttpError 400."""
    if text is None:
        return SERIES
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in SERIES]
    if unknown:
        raise bad_request(f"unknown series {unknown[0]!r}; known are {', '.join(SERIES)}")
    return names
