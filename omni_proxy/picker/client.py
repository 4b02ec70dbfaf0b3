"""Client of the picker, for programs that send their requests to workers themselves.

    picker = WorkerPicker("http://127.0.0.1:30000")
    with picker.worker(session_id="rollout-7") as worker:
        httpx.post(f"{worker.url}/generate", json=body)

Contract: an acquired request is counted at its worker until it is released, at most for its lease.
`AsyncWorkerPicker` has the same methods for trio and asyncio. Nothing here imports the proxy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final
from urllib.parse import quote

import anyio
import httpx
import msgspec

TIMEOUT_SECS: Final = 30.0
RELEASE_SECS: Final = 5.0  # limit of a release after a cancelled block; later the lease ends it
BUSY_STATUSES: Final = (429, 503)
_Keys = Mapping[str, object]


class ReservedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A reserved worker. `url`: send the request there.

    `rank`: the data-parallel rank to put into the request, None if the worker has no ranks.
    `model`: the model name to send instead of an alias, None if it needs no change.
    """

    reservation_id: str
    worker_id: str
    endpoint: str
    url: str
    rank: int | None = None
    model: str | None = None
    lease_secs: float | None = None


class PickerError(Exception):
    """The picker refused the request. `status` and `code`: see docs/picker.md."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class NoWorkerNow(PickerError):
    """No worker can take the request now: try again after `retry_after_secs`."""

    def __init__(self, status: int, code: str, message: str, retry_after_secs: float) -> None:
        super().__init__(status, code, message)
        self.retry_after_secs = retry_after_secs


class WorkerPicker:
    """A client of the proxy, or of `omni-proxy picker`, at `url`.

    `api_key`: an admin key, if the server requires one.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout_secs: float = TIMEOUT_SECS) -> None:
        self._client = httpx.Client(**_settings(url, api_key, timeout_secs))

    def acquire(self, request: _Keys | None = None, **keys: object) -> ReservedWorker:
        """Reserve a worker for a model request, which counts as in flight there from now on.

        `keys`: session_id, model_name, lease_secs, path, headers, selection_id (docs/picker.md).
        Raises NoWorkerNow, PickerError, httpx.TransportError.
        """
        return _read(self._client.post("/select_and_reserve", content=_body(request, keys)))

    def release(self, worker: ReservedWorker) -> bool:
        """Release the worker after the request. Returns False if the lease had already ended.

        Raises PickerError, httpx.TransportError.
        """
        return _was_released(self._client.delete(_reservation_path(worker)))

    @contextmanager
    def worker(self, request: _Keys | None = None, **keys: object) -> Iterator[ReservedWorker]:
        """`acquire` a worker, and `release` it at the end of the block."""
        worker = self.acquire(request, **keys)
        try:
            yield worker
        finally:
            self.release(worker)

    def close(self) -> None:
        self._client.close()


class AsyncWorkerPicker:
    """`WorkerPicker` for trio and asyncio."""

    def __init__(self, url: str, *, api_key: str = "", timeout_secs: float = TIMEOUT_SECS) -> None:
        self._client = httpx.AsyncClient(**_settings(url, api_key, timeout_secs))

    async def acquire(self, request: _Keys | None = None, **keys: object) -> ReservedWorker:
        body = _body(request, keys)
        return _read(await self._client.post("/select_and_reserve", content=body))

    async def release(self, worker: ReservedWorker) -> bool:
        return _was_released(await self._client.delete(_reservation_path(worker)))

    @asynccontextmanager
    async def worker(
        self, request: _Keys | None = None, **keys: object
    ) -> AsyncIterator[ReservedWorker]:
        """`acquire` a worker, and `release` it at the end of the block, also if it is cancelled."""
        worker = await self.acquire(request, **keys)
        try:
            yield worker
        finally:
            with anyio.move_on_after(RELEASE_SECS, shield=True):
                await self.release(worker)

    async def close(self) -> None:
        await self._client.aclose()


def _settings(url: str, api_key: str, timeout_secs: float) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {"base_url": url, "headers": headers, "timeout": timeout_secs, "trust_env": False}


def _body(request: _Keys | None, keys: _Keys) -> bytes:
    fields = {name: value for name, value in keys.items() if value is not None}
    return msgspec.json.encode(fields if request is None else {**fields, "request": request})


def _reservation_path(worker: ReservedWorker) -> str:
    return f"/reservations/{quote(worker.reservation_id, safe='')}"


def _read(response: httpx.Response) -> ReservedWorker:
    if response.status_code != 200:
        raise _error(response)
    return msgspec.json.decode(response.content, type=ReservedWorker)


def _was_released(response: httpx.Response) -> bool:
    if response.status_code not in (200, 404):
        raise _error(response)
    return response.status_code == 200


def _error(response: httpx.Response) -> PickerError:
    try:
        error = response.json()["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        code, message = "no_picker", f"HTTP {response.status_code} is not a response of a picker"
    if response.status_code not in BUSY_STATUSES:
        return PickerError(response.status_code, code, message)
    after = response.headers.get("retry-after", "1")
    secs = float(after) if after.isdecimal() else 1.0
    return NoWorkerNow(response.status_code, code, message, secs)
