"""The text routes of the first sglang-router: /add_worker, /remove_worker, /list_workers.

Contract: the texts are those that its clients compare, character by character (routers.md 5). A
worker is added only after it answered its health check; until then nothing has changed.
"""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime
from urllib.parse import quote

import trio
from quart import Quart, Response, request

from omni_proxy.admin_api.fleet_changes import FleetChanges, api_worker_spec, parse_worker_url
from omni_proxy.admin_api.responses import bad_request, json_response, text_response
from omni_proxy.admin_api.services import Services
from omni_proxy.config.overlay import WorkerSpec, with_defaults
from omni_proxy.config.url import dial_address
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import Call, call_worker
from omni_proxy.upstream_http.resolver import RefusedAddress, resolve
from omni_proxy.wire.errors import HttpError

log = logging.getLogger(__name__)

WAIT_SECS = 30.0  # for a worker that is still starting; `timeout_secs` in the query asks for more
MAX_WAIT_SECS = 1800.0
PAUSE_SECS = 0.25
PROBE_PAUSE_SECS = 0.05
ROUTABLE_SECS = 5.0  # from registered to routable; past it the worker is in, only not believed yet


class SglangRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._changes = FleetChanges(services)

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/add_worker", "scale_up", self.add, methods=["POST"])
        app.add_url_rule("/remove_worker", "scale_down", self.remove, methods=["POST"])
        app.add_url_rule("/list_workers", "worker_urls", self.urls)

    async def add(self) -> Response:
        named = _url_in_query()
        if "api_key" in request.args:
            raise bad_request(
                "api_key is not taken over HTTP: put the key into an environment variable and name "
                "it as api_key_env in the configuration file"
            )
        url = parse_worker_url(named)
        if self._services.fleet.find(url):
            raise _known_already()
        await self._changes.check_address(url)
        entry = api_worker_spec(url, request.args.get("model", ""))
        await self._until_healthy(entry, _wait_secs())
        try:
            worker = await self._changes.add(entry)
        except HttpError as refusal:
            # A script that lost patience asks again while its first request still waits.
            raise _known_already() if refusal.status == 409 else refusal from None
        log.info("worker_registered worker=%s url=%s", worker.display_id, url)
        await self._until_routable(worker)
        return text_response(f"Successfully added worker: {named}")

    async def _until_routable(self, worker: Worker) -> None:
        """Returns early for a worker that nobody probes: dead, or removed meanwhile."""
        with trio.move_on_after(ROUTABLE_SECS):
            while not worker.routable and self._is_probed(worker):
                await self._services.prober.probe_once(worker)
                await trio.sleep(PROBE_PAUSE_SECS)

    def _is_probed(self, worker: Worker) -> bool:
        here = self._services.fleet.find(worker.url) is worker
        return here and worker.health.state is not Health.DEAD

    async def remove(self) -> Response:
        """One that isn't there is removed already: scripts repeat themselves."""
        named = _url_in_query()
        worker = self._services.fleet.get(named) or self._services.fleet.find(
            parse_worker_url(named)
        )
        if worker is not None and await self._removed(worker):
            log.info("worker_deleted worker=%s url=%s", worker.display_id, worker.url)
        return text_response(f"Successfully removed worker: {named}")

    async def _removed(self, worker: Worker) -> bool:
        """False where another request was faster."""
        try:
            await self._changes.remove(worker)
        except HttpError as refusal:
            if refusal.status != 404:
                raise
            return False
        return True

    async def urls(self) -> Response:
        return json_response({"urls": [worker.url for worker in self._services.fleet.workers]})

    async def _until_healthy(self, entry: WorkerSpec, wait_secs: float) -> None:
        """Raises HttpError 400 with the last reason when it stays ill for so long."""
        why = "it has not answered"
        with trio.move_on_after(wait_secs):
            while True:
                why = await self._illness(entry)
                if not why:
                    return
                await trio.sleep(PAUSE_SECS)
        raise HttpError(
            400,
            f"Failed to add worker: {entry.url} did not become healthy within {wait_secs:g} s: "
            f"{why}",
            "worker_not_healthy",
        )

    async def _illness(self, entry: WorkerSpec) -> str:
        """Why the worker is not healthy now, "" when it is."""
        health = self._services.config_store.config.health
        worker = Worker(with_defaults(entry, self._services.config_store.config), datetime.now(UTC))
        place = dial_address(entry.url)
        try:
            if not isinstance(place, str):
                worker.address = await resolve(*place)
        except RefusedAddress as refused:
            raise bad_request(f"url: {refused}", "worker_url_refused") from None
        except OSError as error:
            return str(error)
        target = quote(health.endpoint, safe="/%:@!$&'()*+,;=~?")
        outcome = await call_worker(worker, Call("GET", target, timeout_secs=health.timeout_secs))
        if outcome.ok:
            return ""
        return f"{outcome.failure}: {outcome.detail}" if outcome.detail else outcome.failure


def _known_already() -> HttpError:
    return bad_request("Worker URL already exists", "worker_already_exists")


def _url_in_query() -> str:
    """`url` as it was written, encoded or not. Raises HttpError 400 without one."""
    named = request.args.get("url", "").strip()
    if not named:
        # What clients of that router know: its framework's own words.
        raise bad_request("Failed to deserialize query string: missing field `url`", "missing_url")
    return named


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
