"""POST /select, POST /select_and_reserve, DELETE /reservations/{id}: pick a worker for a request
that the caller sends itself (note:features 10).

Invariant: no call waits for a worker. If none can take the request now, the response is a 503.
After an upgrade the new program answers, also on connections to the old one.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

import httpx
from quart import Quart, Response, request

from omni_proxy.admin_api.responses import body_bytes, json_response
from omni_proxy.admin_api.services import PickerView, WorkerChoice
from omni_proxy.config.url import dial_address
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.picker.picker import read_selection
from omni_proxy.wire.errors import HttpError

SUCCESSOR_SECS: Final = 10.0


class PickerRoutes:
    """`picker`: None while it does not run."""

    def __init__(self, picker: PickerView | None) -> None:
        self._picker_view = picker

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/select", "select", self.select, methods=["POST"])
        app.add_url_rule(
            "/select_and_reserve", "select_and_reserve", self.reserve, methods=["POST"]
        )
        app.add_url_rule(
            "/reservations/<path:reservation_id>", "release", self.release, methods=["DELETE"]
        )

    async def select(self) -> Response:
        selection = read_selection(await body_bytes())
        return json_response(choice_record(await self._picker().select(selection)))

    async def reserve(self) -> Response:
        body = await body_bytes()
        if successor := self._picker().successor:
            return await _forward(successor, "/select_and_reserve", body)
        return json_response(choice_record(await self._picker().reserve(read_selection(body))))

    async def release(self, reservation_id: str) -> Response:
        if successor := self._picker().successor:
            return await _forward(successor, f"/reservations/{quote(reservation_id, safe='')}")
        await self._picker().release(reservation_id)
        return json_response({"reservation_id": reservation_id, "released": True})

    def _picker(self) -> PickerView:
        if self._picker_view is None:
            raise HttpError(503, "the picker is not running", "picker_unavailable")
        return self._picker_view


async def _forward(admin_socket: str, target: str, body: bytes = b"") -> Response:
    """Forward the current request to the program with the reservations. Raises HttpError 503."""
    transport = httpx.AsyncHTTPTransport(uds=admin_socket)
    kept = ("content-type", "authorization", "x-api-key")
    headers = {name: request.headers[name] for name in kept if name in request.headers}
    async with httpx.AsyncClient(transport=transport, timeout=SUCCESSOR_SECS) as client:
        try:
            response = await client.request(
                request.method, f"http://picker{target}", content=body, headers=headers
            )
        except httpx.HTTPError as error:
            message = f"the program that an upgrade has started does not answer: {error}"
            raise HttpError(503, message, "picker_unavailable") from None
    return Response(response.content, response.status_code, dict(response.headers))


def choice_record(choice: WorkerChoice) -> dict[str, object]:
    """`endpoint`: host and port, or the path of a Unix socket. `rank`: the data-parallel rank to
    name in the request, else None. `model`: the target that replaces an alias, else None."""
    target = choice.target
    worker = target.worker
    reserved = choice.reservation_id is not None
    return {
        "reservation_id": choice.reservation_id,
        "worker_id": worker.id,
        "endpoint": endpoint_of(worker.url),
        "url": worker.url,
        "rank": target.index if isinstance(target, DpRank) else None,
        "model": choice.model,
        "lease_secs": choice.lease_secs if reserved else None,
    }


def endpoint_of(url: str) -> str:
    """`host:port`, with the scheme's default port if there is none; of `unix:PATH` the path."""
    address = dial_address(url)
    if isinstance(address, str):
        return address
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
