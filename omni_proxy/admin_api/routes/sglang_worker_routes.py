"""The text routes of the first sglang-router: /add_worker, /remove_worker, /list_workers.

Contract: clients compare the texts character by character (note:routers 5). A worker is added only
after it answered its health check; until then nothing has changed. A request that names the worker
in a JSON body, as miles does, gets a JSON response, and may be repeated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from quart import Quart, Response, request

from omni_proxy.admin_api.fleet_changes import (
    MAX_WAIT_SECS,
    WAIT_SECS,
    FleetChanges,
    WorkerArrivals,
    api_worker_spec,
    parse_ranked_url,
    parse_worker_url,
)
from omni_proxy.admin_api.responses import json_object, json_response, text_response
from omni_proxy.admin_api.services import WorkerServices
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError, bad_request

log = logging.getLogger(__name__)


class SglangWorkerRoutes:
    def __init__(
        self, workers: WorkerServices, config_store: ConfigStore, changes: FleetChanges
    ) -> None:
        self._fleet = workers.fleet
        self._kv_connector = config_store.startup.kv_connector
        self._changes = changes
        self._arrivals = WorkerArrivals(workers, config_store)

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/add_worker", "scale_up", self.add, methods=["POST"])
        app.add_url_rule("/remove_worker", "scale_down", self.remove, methods=["POST"])
        app.add_url_rule("/list_workers", "worker_urls", self.urls)

    async def add(self) -> Response:
        url_text, as_json = await _named_url()
        if "api_key" in request.args:
            raise bad_request(
                "api_key is not taken over HTTP: put the key into an environment variable and name "
                "it as api_key_env in the configuration file"
            )
        url, ranks = parse_ranked_url(url_text)
        if as_json and self._fleet.find(url):
            return self._counts()
        await self._add(url, ranks)
        return (
            self._counts() if as_json else text_response(f"Successfully added worker: {url_text}")
        )

    async def _add(self, url: str, ranks: Mapping[str, object]) -> None:
        if self._fleet.find(url):
            raise _known_already()
        await self._changes.check_address(url)
        settings = {"model": request.args.get("model", ""), **ranks}
        entry = api_worker_spec(url, settings, self._kv_connector)
        await self._arrivals.until_healthy(entry, _wait_secs())
        try:
            worker = await self._changes.add(entry)
        except HttpError as error:
            # A script may time out and retry while its first request still waits.
            raise _known_already() if error.status == 409 else error from None
        log.info("worker_registered worker=%s url=%s", worker.display_id, url)
        await self._arrivals.until_routable(worker)

    def _counts(self) -> Response:
        """The requests in flight at each worker, in the form of miles' router."""
        in_flight = {worker.url: worker.in_flight for worker in self._fleet.workers}
        return json_response({"status": "success", "worker_urls": in_flight})

    async def remove(self) -> Response:
        """Remove a worker. An unknown worker is a success, because scripts repeat requests."""
        url_text, as_json = await _named_url()
        worker = self._fleet.get(url_text) or self._fleet.find(parse_worker_url(url_text))
        if worker is not None and await self._removed(worker):
            log.info("worker_deleted worker=%s url=%s", worker.display_id, worker.url)
        if as_json:
            return self._counts()
        return text_response(f"Successfully removed worker: {url_text}")

    async def _removed(self, worker: Worker) -> bool:
        """Remove the worker; False if another request has already removed it."""
        try:
            await self._changes.remove(worker)
        except HttpError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def urls(self) -> Response:
        return json_response({"urls": [worker.url for worker in self._fleet.workers]})


def _known_already() -> HttpError:
    return bad_request("Worker URL already exists", "worker_already_exists")


async def _named_url() -> tuple[str, bool]:
    """The worker's URL as received, encoded or not, and whether it was in a JSON body. Raises
    HttpError 400 without one."""
    url_text = request.args.get("url", "").strip()
    if url_text:
        return url_text, False
    body = await json_object()
    url = request.args.get("worker_url") or body.get("url") or body.get("worker_url")
    if isinstance(url, str) and url.strip():
        return url.strip(), True
    # The text of that router's framework, which its clients expect.
    raise bad_request("Failed to deserialize query string: missing field `url`", "missing_url")


def _wait_secs() -> float:
    timeout = request.args.get("timeout_secs")
    if timeout is None:
        return WAIT_SECS
    try:
        secs = float(timeout)
    except ValueError:
        secs = math.nan
    if not 0 < secs <= MAX_WAIT_SECS:
        raise bad_request(f"timeout_secs must be a number above 0, up to {MAX_WAIT_SECS:g}")
    return secs
