"""Workers over HTTP: list, look up, add, switch, delete (omni-router.md 5, and smg's dialect).

Invariant: every change goes through the keeper, whole or not at all; health (`is_dead`) is no
configuration and goes to the fleet, after the change was accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import trio
from quart import Quart, Response, request

from omni_proxy.config.capabilities import CAPABILITIES
from omni_proxy.config.overlay import Desired, State, with_added, with_deleted, with_switched
from omni_proxy.config.schema import Config
from omni_proxy.config.supported import not_yet
from omni_proxy.config.url import dial_address, normalize_url
from omni_proxy.fleet.worker import Worker
from omni_proxy.front.bodies import WorkerBody, judge_add, judge_patch, judge_switch
from omni_proxy.front.records import Records
from omni_proxy.front.replies import bad, json_object, reply
from omni_proxy.front.revisions import etag, if_match, refuse_mismatch
from omni_proxy.front.rooms import Rooms
from omni_proxy.watch.resolver import RefusedAddress, resolve
from omni_proxy.wire.errors import Refusal

log = logging.getLogger(__name__)

Edit = Callable[[State, Config], State]


class WorkerRoutes:
    def __init__(self, rooms: Rooms, records: Records) -> None:
        self._rooms = rooms
        self._records = records

    def mount(self, app: Quart) -> None:
        # A path, for Werkzeug has decoded the %2F of a worker id already.
        one = "/workers/<path:name>"
        app.add_url_rule("/workers", "workers", self.all)
        app.add_url_rule("/workers", "add_worker", self.add, methods=["POST"])
        app.add_url_rule(one, "worker", self.one)
        app.add_url_rule(one, "switch_worker", self.switch, methods=["PUT"])
        app.add_url_rule(one, "patch_worker", self.patch, methods=["PATCH"])
        app.add_url_rule(one, "delete_worker", self.delete, methods=["DELETE"])

    async def all(self) -> Response:
        pool = self._records.pool("ok", request.args.get("model"))
        total = len(self._rooms.fleet.workers)
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": total}
        return reply({**pool, "total": total, "stats": stats})

    async def one(self, name: str) -> Response:
        return reply(self._records.one(self._find(name)))

    async def add(self) -> Response:
        body = await json_object()
        judged = judge_add(body, prefers_async=_prefers_async())
        url = _wanted_url(body)
        await self._refuse_bad_name(url)
        entry = _entry(url, judged)
        await self._change(lambda state, _: with_added(self._without(url, state), entry))
        worker = self._find(url)
        log.info("worker_registered worker=%s url=%s", worker.display_id, url)
        self._records.note(worker, judged.remarks)
        if judged.in_background:
            return self._accepted(worker, judged, "worker added; its first probe is under way")
        if worker.machine.last_checked_at is None:
            await self._rooms.prober.probe_once(worker)
        return self._done(worker)

    async def switch(self, name: str) -> Response:
        body = await json_object()
        known = self._rooms.fleet.get(name)
        judged = judge_switch(body, known.url if known else None, prefers_async=_prefers_async())
        worker = self._find(name)
        await self._change(self._switching(worker, judged.switches))
        log.info("worker_updated worker=%s url=%s", worker.display_id, worker.url)
        self._records.note(worker, judged.remarks)
        if judged.is_dead:
            self._rooms.fleet.mark_dead(worker, datetime.now(UTC))
        elif judged.is_dead is False:
            self._rooms.fleet.revive(worker, datetime.now(UTC))
            if not judged.in_background:
                await self._rooms.prober.probe_once(worker)
        if judged.in_background:
            return self._accepted(worker, judged, "worker updated")
        return self._done(worker)

    async def patch(self, name: str) -> Response:
        judged = judge_patch(await json_object())
        worker = self._find(name)
        await self._change(self._switching(worker, {}))
        self._records.note(worker, judged.remarks)
        return self._accepted(worker, judged, "worker updated")

    async def delete(self, name: str) -> Response:
        worker = self._find(name)

        def edit(state: State, config: Config) -> State:
            self._find(worker.url)
            return with_deleted(state, config, worker.url)

        await self._change(edit)
        log.info("worker_deleted worker=%s url=%s", worker.display_id, worker.url)
        headers = etag(self._rooms.keeper.revision)
        return reply({"status": "ok", "worker_id": worker.id}, headers=headers)

    def _find(self, name: str) -> Worker:
        worker = self._rooms.fleet.get(name)
        if worker is None:
            raise Refusal(404, "worker not found", "worker_not_found")
        return worker

    def _without(self, url: str, state: State) -> State:
        """Asked inside the change, so that of two equal requests at once only one succeeds."""
        if self._rooms.fleet.find(url):
            raise Refusal(409, "worker already registered", "worker_already_exists")
        return state

    def _switching(self, worker: Worker, switches: Mapping[str, object]) -> Edit:
        def edit(state: State, _: Config) -> State:
            self._find(worker.url)
            return with_switched(state, worker.url, **switches) if switches else state

        return edit

    async def _change(self, edit: Edit) -> None:
        changed = await self._rooms.keeper.change(edit, if_match())
        refuse_mismatch(changed)
        if changed.outcome == "refused":
            raise bad(str(changed.error), "change_refused")

    async def _refuse_bad_name(self, url: str) -> None:
        """A name that can't be resolved now is no error: its worker is just not healthy yet."""
        place = dial_address(url)
        with trio.move_on_after(self._rooms.keeper.config.health.timeout_secs):
            try:
                await resolve(*place) if not isinstance(place, str) else None
            except RefusedAddress as refused:
                raise bad(f"url: {refused}", "worker_url_refused") from None
            except OSError:
                return

    def _done(self, worker: Worker) -> Response:
        record = self._records.one(worker)
        headers = etag(self._rooms.keeper.revision)
        return reply({"status": "ok", "worker": record}, headers=headers)

    def _accepted(self, worker: Worker, judged: WorkerBody, message: str) -> Response:
        location = f"/workers/{worker.id}"
        answer: dict[str, object] = {
            "status": "accepted",
            "worker_id": worker.id,
            "url": worker.url,
            "location": location,
            "message": message,
        }
        if judged.ignored:
            answer["ignored"] = judged.ignored
        headers = {"Location": location, **etag(self._rooms.keeper.revision)}
        return reply(answer, 202, headers)


def _prefers_async() -> bool:
    wishes = request.headers.get("Prefer", "").lower().replace(";", ",").split(",")
    return "respond-async" in (wish.strip() for wish in wishes)


def _wanted_url(body: Mapping[str, object]) -> str:
    """Query before body, `url` before `worker_url`."""
    for source in (request.args, body):
        for key in ("url", "worker_url"):
            named = source.get(key)
            if isinstance(named, str) and named:
                try:
                    url = normalize_url(named, allow_unix=False)
                except ValueError as reason:
                    raise bad(f"url {reason}", "worker_url_refused") from None
                if refused := not_yet("workers.url", url):
                    raise bad(refused, "not_supported_yet")
                return url
    raise bad("worker url is required")


def _entry(url: str, judged: WorkerBody) -> Desired:
    named = judged.switches.get("capabilities", CAPABILITIES)
    capabilities = frozenset(named) if isinstance(named, tuple) else frozenset()
    return Desired(
        url=url,
        model=str(judged.switches.get("model", "")) or None,
        capabilities=capabilities,
        disabled=False,
        weight=1,
        max_inflight=0,
        origin="api",
    )
