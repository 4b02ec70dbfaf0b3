"""For programs that send their requests to workers themselves: `acquire` a worker, then `release`.

    picker = WorkerPicker("http://127.0.0.1:30000")
    with picker.worker(session_id="rollout-7") as worker:
        httpx.post(f"{worker.url}/generate", json=body)

Contract: what was acquired is counted at its worker until it is released, at most for its lease.
`AsyncWorkerPicker` is the same for trio and asyncio. Nothing here knows the proxy's own objects.
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
RELEASE_SECS: Final = 5.0  # of a block that is cancelled; then the lease ends it
BUSY_STATUSES: Final = (429, 503)
_Keys = Mapping[str, object]


class ReservedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """`url`: where to send the request. `rank`: the data-parallel rank to name in it, if its worker
    has ranks. `model`: what to send in the place of an alias."""

    reservation_id: str
    worker_id: str
    endpoint: str
    url: str
    rank: int | None = None
    model: str | None = None
    lease_secs: float | None = None


class PickerError(Exception):
    """The picker refuses; `status` and `code` as docs/picker.md has them."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class NoWorkerNow(PickerError):
    """No worker can take it now: try again after `retry_after_secs`."""

    def __init__(self, status: int, code: str, message: str, retry_after_secs: float) -> None:
        super().__init__(status, code, message)
        self.retry_after_secs = retry_after_secs


class WorkerPicker:
    """`url`: of the proxy, or of `omni-proxy picker`. `api_key`: an admin key, if it wants one."""

    def __init__(self, url: str, *, api_key: str = "", timeout_secs: float = TIMEOUT_SECS) -> None:
        self._client = httpx.Client(**_settings(url, api_key, timeout_secs))

    def acquire(self, request: _Keys | None = None, **keys: object) -> ReservedWorker:
        """A worker for a model request, which is counted there from now on. `keys` are those of
        docs/picker.md: session_id, model_name, lease_secs, path, headers, selection_id.

        Raises NoWorkerNow, PickerError, httpx.TransportError.
        """
        return _read(self._client.post("/select_and_reserve", content=_body(request, keys)))

    def release(self, worker: ReservedWorker) -> bool:
        """The request is over. False if its lease had ended before. Raises PickerError,
        httpx.TransportError."""
        return _released(self._client.delete(_place(worker)))

    @contextmanager
    def worker(self, request: _Keys | None = None, **keys: object) -> Iterator[ReservedWorker]:
        """`acquire`, and `release` at the end of the block."""
        worker = self.acquire(request, **keys)
        try:
            yield worker
        finally:
            self.release(worker)

    def close(self) -> None:
        self._client.close()


class AsyncWorkerPicker:
    """The same, for trio and asyncio."""

    def __init__(self, url: str, *, api_key: str = "", timeout_secs: float = TIMEOUT_SECS) -> None:
        self._client = httpx.AsyncClient(**_settings(url, api_key, timeout_secs))

    async def acquire(self, request: _Keys | None = None, **keys: object) -> ReservedWorker:
        body = _body(request, keys)
        return _read(await self._client.post("/select_and_reserve", content=body))

    async def release(self, worker: ReservedWorker) -> bool:
        return _released(await self._client.delete(_place(worker)))

    @asynccontextmanager
    async def worker(
        self, request: _Keys | None = None, **keys: object
    ) -> AsyncIterator[ReservedWorker]:
        """`acquire`, and `release` at the end of the block, also if that is cancelled."""
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
    asked = {name: value for name, value in keys.items() if value is not None}
    return msgspec.json.encode(asked if request is None else {**asked, "request": request})


def _place(worker: ReservedWorker) -> str:
    return f"/reservations/{quote(worker.reservation_id, safe='')}"


def _read(answer: httpx.Response) -> ReservedWorker:
    if answer.status_code != 200:
        raise _error(answer)
    return msgspec.json.decode(answer.content, type=ReservedWorker)


def _released(answer: httpx.Response) -> bool:
    if answer.status_code not in (200, 404):
        raise _error(answer)
    return answer.status_code == 200


def _error(answer: httpx.Response) -> PickerError:
    try:
        error = answer.json()["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        code, message = "no_picker", f"HTTP {answer.status_code} is no answer of a picker"
    if answer.status_code not in BUSY_STATUSES:
        return PickerError(answer.status_code, code, message)
    after = answer.headers.get("retry-after", "1")
    secs = float(after) if after.isdecimal() else 1.0
    return NoWorkerNow(answer.status_code, code, message, secs)
