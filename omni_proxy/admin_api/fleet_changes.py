"""Changes of the fleet over HTTP, in any dialect, and waiting for a worker that joins.

Contract: everything is validated before anything changes, and only the configuration store changes
the fleet. A change that fails raises HttpError and has no effect. A wait changes nothing and has a
time limit; each step of it is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote
from uuid import NAMESPACE_URL, uuid5

import msgspec
import trio
from quart import request

from omni_proxy.admin_api.responses import if_match, raise_on_mismatch, warn
from omni_proxy.admin_api.services import DataPlaneView, WorkerServices
from omni_proxy.config.overlay import (
    SavedState,
    StateWorker,
    WorkerSpec,
    spec_of,
    with_added,
    with_defaults,
    with_deleted,
)
from omni_proxy.config.schema import Config
from omni_proxy.config.url import dial_address, normalize_url, split_rank
from omni_proxy.fleet.cordon_reasons import PAUSED, UNCERTAIN
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore, Edit
from omni_proxy.shared.engine_protocol import KvConnector
from omni_proxy.upstream_http.client import Call, call_worker
from omni_proxy.upstream_http.resolver import (
    REASON,
    Address,
    RefusedAddress,
    addresses,
    is_own_address,
    parse_listeners,
    resolve,
)
from omni_proxy.wire.errors import HttpError, bad_request

UUID_CHARS: Final = 36
_NO_SETTINGS: Final[Mapping[str, object]] = {}


async def change_state(config_store: ConfigStore, edit: Edit, *, at_once: bool = False) -> None:
    """Raises HttpError: 412 for If-Match, 400 for a change that the configuration refuses.

    Waits for a running operation on the workers to end, unless `at_once`.
    """
    changed = await config_store.change(edit, if_match(), at_once=at_once)
    raise_on_mismatch(changed)
    if changed.outcome == "refused":
        raise bad_request(str(changed.error), "change_refused")
    if error := config_store.state_error:
        warn(f"the change is active but not saved, a restart will lose it: {error}")


class FleetChanges:
    """Adds and removes workers through the configuration store, with HTTP errors."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore, data_plane: DataPlaneView) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._data_plane = data_plane

    async def add(self, entry: WorkerSpec) -> Worker:
        """Raises HttpError 409 if it is registered already."""

        def edit(state: SavedState, _: Config) -> SavedState:
            # Checked inside the change, so that only one of two equal concurrent requests succeeds.
            self.refuse_known(entry.url)
            return with_added(state, entry)

        await change_state(self._config_store, edit)
        return find_worker(self._fleet, entry.url)

    def refuse_known(self, url: str) -> None:
        """Raises HttpError 409 if it is registered already."""
        if self._fleet.find(url):
            raise _error(409, "worker already registered", "worker_already_exists")

    async def remove(self, worker: Worker) -> None:
        """Raises HttpError 404 if another request removed it first."""

        def edit(state: SavedState, config: Config) -> SavedState:
            find_worker(self._fleet, worker.url)
            return with_deleted(state, config, worker.url)

        await change_state(self._config_store, edit)

    async def check_address(self, url: str) -> None:
        """Raises HttpError 400 for a refused address. A name that does not resolve is not an error:
        its worker is just not healthy yet."""
        address = dial_address(url)
        with trio.move_on_after(self._config_store.config.health.timeout_secs):
            try:
                if not isinstance(address, str):
                    self._refuse_own_address(await addresses(*address))
            except RefusedAddress as error:
                raise bad_request(f"url: {error}", "worker_url_refused") from None
            except OSError:
                return

    def _refuse_own_address(self, addresses: Iterable[Address]) -> None:
        """Raises HttpError 400 for an address that the proxy itself listens on."""
        listeners = parse_listeners(self._data_plane.addresses())
        if any(is_own_address(address, listeners) for address in addresses):
            raise _error(400, f"url {REASON}", "worker_url_refused")


def lookup_worker(fleet: Fleet, name: str) -> Worker | None:
    """The worker with this URL or id, of either kind; a URL is normalized as when it is added."""
    try:
        spelled = normalize_url(unquote(name), allow_unix=True)
    except ValueError:
        spelled = name
    return fleet.get(name) or fleet.find(spelled) or _by_gateway_id(fleet, name)


def _by_gateway_id(fleet: Fleet, name: str) -> Worker | None:
    if len(name) != UUID_CHARS:
        return None
    return next(
        (worker for worker in fleet.workers if gateway_id(worker.url) == name.lower()), None
    )


def find_worker(fleet: Fleet, name: str) -> Worker:
    """Like `lookup_worker`. Raises HttpError 404, or 400 for the URL of a data-parallel rank."""
    worker = lookup_worker(fleet, name)
    bare, rank = split_rank(unquote(name))
    if worker is None and rank is not None and (of := lookup_worker(fleet, bare)) is not None:
        raise _one_rank(of.url)
    if worker is None:
        raise _error(404, "worker not found", "worker_not_found")
    return worker


@lru_cache(maxsize=4096)
def gateway_id(url: str) -> str:
    """A worker id in sglang-router's form, a UUID, which its clients check. It depends only on the
    URL."""
    return str(uuid5(NAMESPACE_URL, url))


def _error(status: int, message: str, code: str) -> HttpError:
    return with_gateway_code(HttpError(status, message, code))


def with_gateway_code(refusal: HttpError) -> HttpError:
    """Add the error code of sgl-model-gateway, if it has one for this error (note:routers 1.7)."""
    if refusal.status in (400, 404, 409) and "top_code" not in refusal.extra:
        code = "BAD_REQUEST" if refusal.status == 400 else str(refusal.code).upper()
        refusal.extra["top_code"] = code
        refusal.with_headers(("X-SMG-Error-Code", code))
    return refusal


def _one_rank(url: str) -> HttpError:
    message = f"a data-parallel rank is not a worker: use {url}, or change its `ranks`"
    return _error(400, message, "rank_is_no_worker")


def parse_ranked_url(text: str) -> tuple[str, dict[str, object]]:
    """The normalized URL of a worker to be added, and the settings that follow from it: with a
    data-parallel rank, `URL@RANK`, the worker has ranks. Raises HttpError 400."""
    bare, rank = split_rank(text)
    return parse_worker_url(bare), {} if rank is None else {"ranks": "auto"}


def parse_worker_url(text: str) -> str:
    """The normalized URL of a worker. Raises HttpError 400."""
    bare, rank = split_rank(text)
    if rank is not None:
        raise _one_rank(bare)
    try:
        return normalize_url(text, allow_unix=False)
    except ValueError as error:
        raise _error(400, f"url {error}", "worker_url_refused") from None


def requested_url(body: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Like `parse_ranked_url`, for the URL in the request: query before body, `url` before
    `worker_url`. Raises HttpError 400."""
    for source in (request.args, body):
        for key in ("url", "worker_url"):
            text = source.get(key)
            if isinstance(text, str) and text:
                return parse_ranked_url(text)
    raise _error(400, "worker url is required", "invalid_request")


def api_worker_spec(
    url: str, settings: Mapping[str, object] = _NO_SETTINGS, kv_connector: KvConnector = "sglang"
) -> WorkerSpec:
    """The spec of a worker added over HTTP; `settings` as in a `WorkerBody`. The default is all
    capabilities, and `kv_connector` as KV connector."""
    values = {"url": url, "kv_connector": kv_connector, **settings}
    worker = msgspec.convert(values, StateWorker)
    return spec_of(worker, "api")


WAIT_SECS = 30.0  # for a worker that is still starting, by default
MAX_WAIT_SECS = 7200.0
PAUSE_SECS = 0.25
PROBE_PAUSE_SECS = 0.05
NO_PROBE_ENDS = (PAUSED, UNCERTAIN)
ROUTABLE_SECS = 5.0  # longest wait from registered to routable; the worker stays added after it


class WorkerArrivals:
    """Waits until a worker that is added is healthy, or takes requests."""

    def __init__(self, workers: WorkerServices, config_store: ConfigStore) -> None:
        self._workers = workers
        self._config_store = config_store

    async def until_routable(self, worker: Worker) -> None:
        """Probe the worker until it is routable, for at most ROUTABLE_SECS. Returns early if it is
        not probed (dead, or removed in the meantime), or if only an operator or a trainer can bring
        it back: paused, or with unverified weights."""
        with trio.move_on_after(ROUTABLE_SECS):
            while (
                not worker.routable
                and self._is_probed(worker)
                and worker.cordon_reasons.isdisjoint(NO_PROBE_ENDS)
            ):
                await self._workers.prober.probe_once(worker)
                await trio.sleep(PROBE_PAUSE_SECS)

    def _is_probed(self, worker: Worker) -> bool:
        here = self._workers.fleet.find(worker.url) is worker
        return here and worker.health.state is not Health.DEAD

    async def until_healthy(self, entry: WorkerSpec, wait_secs: float) -> None:
        """Raises HttpError 400 with the last reason if the worker is not healthy in time."""
        reason = "it has not answered"
        with trio.move_on_after(wait_secs):
            while True:
                reason = await self._health_problem(entry)
                if not reason:
                    return
                await trio.sleep(PAUSE_SECS)
        raise HttpError(
            400,
            f"Failed to add worker: {entry.url} did not become healthy within {wait_secs:g} s: "
            f"{reason}",
            "worker_not_healthy",
        )

    async def _health_problem(self, entry: WorkerSpec) -> str:
        """The reason why the worker is not healthy now; "" if it is."""
        health = self._config_store.config.health
        worker = Worker(with_defaults(entry, self._config_store.config), datetime.now(UTC))
        place = dial_address(entry.url)
        try:
            if not isinstance(place, str):
                worker.address = await resolve(*place)
        except RefusedAddress as error:
            raise bad_request(f"url: {error}", "worker_url_refused") from None
        except OSError as error:
            return str(error)
        target = quote(health.endpoint, safe="/%:@!$&'()*+,;=~?")
        result = await call_worker(worker, Call("GET", target, timeout_secs=health.timeout_secs))
        if result.ok:
            return ""
        return f"{result.failure}: {result.detail}" if result.detail else result.failure
