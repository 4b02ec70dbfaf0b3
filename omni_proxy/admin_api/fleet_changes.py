"""FleetChanges of the fleet that somebody asked for over HTTP, whatever the words he used.

Contract: everything is judged before anything changes; the keeper alone changes. What can't be done
is a HttpError, and then nothing was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from urllib.parse import unquote

import trio
from quart import request

from omni_proxy.admin_api.responses import bad, if_match, refuse_mismatch, warn
from omni_proxy.admin_api.services import Services
from omni_proxy.config.overlay import SavedState, WorkerSpec, with_added, with_deleted
from omni_proxy.config.schema import CAPABILITIES, Config
from omni_proxy.config.url import dial_address, normalize_url
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.own_address import REASON, is_own_address, parse_listeners
from omni_proxy.upstream_http.resolver import Address, RefusedAddress, addresses
from omni_proxy.wire.errors import HttpError

Edit = Callable[[SavedState, Config], SavedState]


class FleetChanges:
    """Asks the keeper, and says in HTTP's words what came of it."""

    def __init__(self, rooms: Services) -> None:
        self._rooms = rooms

    async def change(self, edit: Edit, *, at_once: bool = False) -> None:
        """Raises HttpError: 412 for If-Match, 400 for a change that the configuration refuses.

        It waits for the end of an operation on the workers, unless it is `at_once`.
        """
        changed = await self._rooms.config_store.change(edit, if_match(), at_once=at_once)
        refuse_mismatch(changed)
        if changed.outcome == "refused":
            raise bad(str(changed.error), "change_refused")
        if error := self._rooms.config_store.state_error:
            warn(f"in force, but not saved, so that a restart would lose it: {error}")

    async def add(self, entry: WorkerSpec) -> Worker:
        """Raises HttpError 409 where it is there already."""

        def edit(state: SavedState, _: Config) -> SavedState:
            # Inside the change, so that of two equal requests at once only one succeeds.
            if self._rooms.fleet.find(entry.url):
                raise _told(409, "worker already registered", "worker_already_exists")
            return with_added(state, entry)

        await self.change(edit)
        return self.find(entry.url)

    async def remove(self, worker: Worker) -> None:
        """Raises HttpError 404 where somebody else was faster."""

        def edit(state: SavedState, config: Config) -> SavedState:
            self.find(worker.url)
            return with_deleted(state, config, worker.url)

        await self.change(edit)

    def known(self, name: str) -> Worker | None:
        """By URL or id, also in another spelling: as a URL is added, so it is found."""
        fleet = self._rooms.fleet
        try:
            spelled = normalize_url(unquote(name), allow_unix=True)
        except ValueError:
            spelled = name
        return fleet.get(name) or fleet.find(spelled)

    def find(self, name: str) -> Worker:
        """As `known`. Raises HttpError 404."""
        worker = self.known(name)
        if worker is None:
            raise _told(404, "worker not found", "worker_not_found")
        return worker

    async def refuse_bad_name(self, url: str) -> None:
        """A name that can't be resolved now is no error: its worker is just not healthy yet."""
        place = dial_address(url)
        with trio.move_on_after(self._rooms.config_store.config.health.timeout_secs):
            try:
                if not isinstance(place, str):
                    self._refuse_own(await addresses(*place))
            except RefusedAddress as refused:
                raise bad(f"url: {refused}", "worker_url_refused") from None
            except OSError:
                return

    def _refuse_own(self, found: Iterable[Address]) -> None:
        """Raises HttpError 400 for an address that we listen on."""
        listeners = parse_listeners(self._rooms.door.addresses())
        if any(is_own_address(address, listeners) for address in found):
            raise _told(400, f"url {REASON}", "worker_url_refused")


def _told(status: int, message: str, code: str) -> HttpError:
    return in_smgs_words_too(HttpError(status, message, code))


def in_smgs_words_too(refusal: HttpError) -> HttpError:
    """The same, where smg has a word for it, with that one beside ours (routers.md 1.7)."""
    if refusal.status in (400, 404, 409) and "top_code" not in refusal.extra:
        word = "BAD_REQUEST" if refusal.status == 400 else str(refusal.code).upper()
        refusal.extra["top_code"] = word
        refusal.with_headers(("X-SMG-Error-Code", word))
    return refusal


def judged_url(text: str) -> str:
    """A worker's URL as somebody wrote it, normalized. Raises HttpError 400."""
    try:
        return normalize_url(text, allow_unix=False)
    except ValueError as reason:
        raise _told(400, f"url {reason}", "worker_url_refused") from None


def wanted_url(body: Mapping[str, object]) -> str:
    """Query before body, `url` before `worker_url`."""
    for source in (request.args, body):
        for key in ("url", "worker_url"):
            named = source.get(key)
            if isinstance(named, str) and named:
                return judged_url(named)
    raise _told(400, "worker url is required", "invalid_request")


def api_entry(url: str, model: str = "", capabilities: frozenset[str] | None = None) -> WorkerSpec:
    """A worker that came over HTTP; without `capabilities` it can do everything."""
    return WorkerSpec(
        url=url,
        model=model or None,
        capabilities=frozenset(CAPABILITIES) if capabilities is None else capabilities,
        disabled=False,
        weight=1,
        max_inflight=0,
        origin="api",
    )
