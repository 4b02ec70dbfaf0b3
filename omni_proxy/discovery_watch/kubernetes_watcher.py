"""Follows the pods of one `[[discover]]`: a list, then a watch from its resource version on.

Invariant: only responses of the API server change the endpoints: a failure leaves them unchanged,
and the next list updates them. A version that the server no longer has (410) leads to a new list, a
watch that was cut or silent to a new watch. Failed attempts are repeated with increasing pauses and
jitter. Lists and events are processed for at most `SLICE_SECS` between two checkpoints. Source:
Kubernetes API concepts, "Efficient detection of changes", "Retrieving large results sets".
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, cast, get_args
from urllib.parse import quote, urlencode

import trio

from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.discovery.endpoints import SourceEndpoint, SourceStatus
from omni_proxy.discovery.pods import EventType, LineBuffer, Pod, PodState, walk_list
from omni_proxy.discovery_watch.api_connection import (
    ALL_NAMESPACES,
    ApiEndpoint,
    ApiError,
    ApiResponse,
    ApiTimeout,
    ClusterAccess,
    get,
)
from omni_proxy.shared.backoff import Backoff

_log = logging.getLogger(__name__)

PAGE_PODS: Final = 250
MAX_LIST_BYTES: Final = 64 * 1024 * 1024
MAX_EVENT_BYTES: Final = 8 * 1024 * 1024
MAX_ERROR_CHARS: Final = 300
LIST_SILENCE_SECS: Final = 10.0
# A watch without any event or bookmark for this time may be dead, and is replaced.
WATCH_SILENCE_SECS: Final = 30.0
WATCH_SECS: Final = 300  # the server ends a watch after this time, up to twice that with jitter
FIRST_PAUSE_SECS: Final = 0.2
MAX_PAUSE_SECS: Final = 30.0
# A watch that lasted this long resets the back-off.
RESET_SECS: Final = 5.0
MIN_WATCH_SECS: Final = 1.0
SLICE_SECS: Final = 0.002
GONE: Final = 410

Changed = Callable[[list[SourceEndpoint]], None]


class _VersionGone(Exception):
    """The server no longer has this resource version, or this page of a list."""


class KubernetesWatcher:
    """Watches one entry. `on_change` gets changed endpoints. `jitter` returns 0 to 1."""

    def __init__(
        self,
        entry: DiscoverEntry,
        access: ClusterAccess,
        on_change: Changed,
        jitter: Callable[[], float],
    ) -> None:
        self.state = PodState(entry)
        self.status = SourceStatus(entry.name, entry.kind)
        self.silence_secs = WATCH_SILENCE_SECS
        self._entry = entry
        self._access = access
        self._on_change = on_change
        self._jitter = jitter
        self._backoff = Backoff(FIRST_PAUSE_SECS, MAX_PAUSE_SECS, RESET_SECS)
        self._version = ""  # resource version to watch from; "" if a list is needed

    async def run(self) -> None:
        while True:
            begun_at = trio.current_time()
            try:
                if not self._version:
                    await self._list()
                begun_at = trio.current_time()
                if await self._watch() or trio.current_time() - begun_at >= MIN_WATCH_SECS:
                    continue
                # Pause if the server ended the watch immediately, to avoid a busy loop.
                await trio.sleep(self._pause_secs())
            except _VersionGone:
                self._version = ""
                await trio.sleep(self._pause_secs())
            except ApiError as error:
                if error.status:  # the server refused: without a new list, watches may keep failing
                    self._version = ""
                pause_secs = self._pause_secs(trio.current_time() - begun_at)
                if self.status.failed(str(error), datetime.now(UTC)):
                    _log.warning(
                        "discovery_failed source=%s retry_in=%.1fs error=%s",
                        self.status.name, pause_secs, error,
                    )  # fmt: skip
                await trio.sleep(pause_secs)

    def _pause_secs(self, ran_secs: float = 0.0) -> float:
        return self._backoff.next_delay(ran_secs) * (0.5 + 0.5 * self._jitter())

    async def _open(self, endpoint: ApiEndpoint, query: dict[str, str]) -> ApiResponse:
        """Send a request; return a response with status 200. Raises ApiError, _VersionGone."""
        namespace = await trio.to_thread.run_sync(self._access.namespace)
        inside = "" if namespace == ALL_NAMESPACES else f"/namespaces/{quote(namespace, safe='')}"
        query = {"labelSelector": self._entry.selector, **query}
        response = await get(endpoint, f"/api/v1{inside}/pods?{urlencode(query)}", {})
        if response.status == 200:
            return response
        try:
            text = await _read_error(response)
        finally:
            await response.close()
        if response.status == GONE:
            raise _VersionGone
        raise ApiError(f"status {response.status}: {text}", response.status)

    async def _list(self) -> None:
        endpoint = await trio.to_thread.run_sync(self._access.endpoint)
        pods: list[Pod] = []
        position, version = "", ""
        while True:
            page = {"limit": str(PAGE_PODS), **({"continue": position} if position else {})}
            text = await self._read_page(endpoint, page)
            metadata = await self._read_pods(text, pods)
            version, position = (
                str(metadata.get(key) or "") for key in ("resourceVersion", "continue")
            )
            if not position:
                break
        now = datetime.now(UTC)
        recovered = self.status.error
        self.status.listed(now)
        changed = self.state.replace(pods, trio.current_time())
        self._version = version
        self._on_change(changed)
        _log.log(
            logging.INFO if recovered or self.status.lists == 1 else logging.DEBUG,
            "discovery_listed source=%s pods=%d", self.status.name, len(pods),
        )  # fmt: skip

    async def _read_page(self, endpoint: ApiEndpoint, page: dict[str, str]) -> str:
        """Read one page of a list. Raises ApiError, _VersionGone."""
        response = await self._open(endpoint, page)
        pieces, length = [], 0
        try:
            while piece := await response.read(LIST_SILENCE_SECS):
                await trio.lowlevel.checkpoint()  # a read of buffered bytes is no checkpoint
                pieces.append(piece)
                length += len(piece)
                if length > MAX_LIST_BYTES:
                    raise ApiError(f"the list has more than {MAX_LIST_BYTES} bytes")
        finally:
            await response.close()
        try:
            return b"".join(pieces).decode()
        except UnicodeDecodeError:
            raise ApiError("the list is not UTF-8") from None

    async def _read_pods(self, text: str, pods: list[Pod]) -> dict[str, object]:
        """Appends the pods; returns the list's metadata. Raises ApiError."""
        metadata: dict[str, object] = {}
        begun = time.perf_counter()
        try:
            for key, value in walk_list(text):
                if key == "metadata" and isinstance(value, dict):
                    metadata = value
                elif key == "items" and isinstance(value, dict):
                    pod = self.state.read(value)
                    if pod is not None:
                        pods.append(pod)
                if time.perf_counter() - begun > SLICE_SECS:
                    await trio.lowlevel.checkpoint()
                    begun = time.perf_counter()
        except ValueError as error:
            raise ApiError(f"the list can't be read: {error}") from None
        return metadata

    async def _watch(self) -> bool:
        """Process events until the server ends the watch, or is silent.

        Returns whether any were received. Raises ApiError, _VersionGone.
        """
        endpoint = await trio.to_thread.run_sync(self._access.endpoint)
        secs = WATCH_SECS * (1 + self._jitter())
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": f"{secs:.0f}",
        }
        response = await self._open(endpoint, query)
        self.status.received(datetime.now(UTC))
        lines, received = LineBuffer(MAX_EVENT_BYTES), False
        try:
            while piece := await response.read(self.silence_secs):
                received = True
                await trio.lowlevel.checkpoint()
                begun = time.perf_counter()
                for line in lines.feed(piece):
                    self._read_event(line)
                    if time.perf_counter() - begun > SLICE_SECS:
                        await trio.lowlevel.checkpoint()
                        begun = time.perf_counter()
        except ApiTimeout:
            _log.debug("discovery_watch_silent source=%s", self.status.name)
        except ValueError as error:
            self._version = ""
            raise ApiError(f"an event can't be read: {error}") from None
        finally:
            await response.close()
        return received

    def _read_event(self, line: bytes) -> None:
        """Process one event. Raises ApiError, _VersionGone, ValueError if it is not an event."""
        try:
            event = json.loads(line)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        kind, thing = (
            (event.get("type"), event.get("object")) if isinstance(event, dict) else 2 * (None,)
        )
        if not isinstance(thing, dict):
            raise ValueError(f"no object in {line[:80]!r}")
        if kind == "ERROR":
            if thing.get("code") == GONE:
                raise _VersionGone
            raise ApiError(f"status {thing.get('code')}: {thing.get('message')}", 500)
        metadata = thing.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        self._version = version if isinstance(version, str) and version else self._version
        self._backoff.reset()
        self.status.received(datetime.now(UTC), str(kind))
        if kind in get_args(EventType):
            changed = self.state.apply(cast("EventType", kind), thing, trio.current_time())
            if changed:
                self._on_change(changed)


async def _read_error(response: ApiResponse) -> str:
    """The message of a `Status` body, otherwise the start of the body."""
    body = b""
    try:
        while len(body) < MAX_EVENT_BYTES and (piece := await response.read(LIST_SILENCE_SECS)):
            body += piece
            await trio.lowlevel.checkpoint()
        status = json.loads(body)
        message = status.get("message") if isinstance(status, dict) else None
    except (ApiError, ValueError, RecursionError):
        message = None
    text = message if isinstance(message, str) else body.decode(errors="replace")
    return " ".join(text.split())[:MAX_ERROR_CHARS]
