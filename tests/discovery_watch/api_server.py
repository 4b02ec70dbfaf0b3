"""A Kubernetes API server for pods, on a real socket. It has lists in pages, watches with
bookmarks, resource versions, and status 410 for versions that are too old. Tests can make it fail
as a real server fails.

A watch with a selector behaves as in Kubernetes: an object that begins to match is ADDED, one that
no longer matches is DELETED, whatever changed in it.
"""

from __future__ import annotations

import copy
import itertools
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

import trio

from omni_proxy.config.tables.discover import matches, parse_selector
from tools.http_requests import RequestReader

HISTORY = 1000  # events that a watch can begin at


def pod(
    name: str,
    uid: str = "",
    *,
    ip: str = "127.0.0.1",
    port: int | str | None = None,
    ready: bool = True,
    labels: dict | None = None,
    annotations: dict | None = None,
    namespace: str = "default",
) -> dict:
    """A pod object of the API. `port` is put in an annotation."""
    notes = dict(annotations or {})
    if port is not None:
        notes["omni-proxy.dev/port"] = str(port)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"uid-{name}",
            "labels": {"app": "sglang", **(labels or {})},
            "annotations": notes,
        },
        "spec": {
            "containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 30000}]}]
        },
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


@dataclass
class Faults:
    """How the server fails."""

    status: int = 0  # of every response; 0: no failure
    watch_status: int = 0  # of watches
    silent: bool = False  # requests are read and get no response
    without_events: bool = False  # watches get a response head but no events
    page_gone: bool = False  # once: the next page of a list is answered with 410
    cut_list: int = 0  # bytes of a list that are sent before the connection is closed
    ignore_limit: bool = False


@dataclass(eq=False)
class _Watch:
    stream: trio.abc.Stream
    wanted: Callable[[dict], bool]
    position: int
    lock: trio.Lock = field(default_factory=trio.Lock)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class ApiServer:
    def __init__(self, context: ssl.SSLContext | None = None, token: str = "") -> None:
        self.url = ""
        self.token = token  # "": no token is required
        self.pods: dict[str, dict] = {}  # by uid
        self.version = 1000
        self.faults = Faults()
        self.requests: list[tuple[str, dict[str, str], dict[str, str]]] = []  # path, query, fields
        self._oldest = self.version
        self._history: list[tuple[int, dict | None, dict | None]] = []  # version, before, after
        self._changed = trio.Event()
        self._watches: set[_Watch] = set()
        self._context = context
        self._pages: dict[str, list[dict]] = {}
        self._page_numbers = itertools.count()

    # Changes in the cluster.

    def put(self, thing: dict) -> dict:
        """Creates the object, or replaces it."""
        thing = copy.deepcopy(thing)
        self._event(self.pods.get(thing["metadata"]["uid"]), thing)
        self.pods[thing["metadata"]["uid"]] = thing
        return thing

    def change(self, uid: str, edit: Callable[[dict], object]) -> None:
        thing = copy.deepcopy(self.pods[uid])
        edit(thing)
        self.put(thing)

    def ready(self, uid: str, is_ready: bool) -> None:
        status = "True" if is_ready else "False"
        self.change(uid, lambda thing: thing["status"]["conditions"][0].update(status=status))

    def label(self, uid: str, **labels: str) -> None:
        self.change(uid, lambda thing: thing["metadata"]["labels"].update(labels))

    def begin_deletion(self, uid: str) -> None:
        self.change(
            uid, lambda thing: thing["metadata"].update(deletionTimestamp="2026-11-23T10:00:00Z")
        )

    def delete(self, uid: str) -> None:
        self._event(self.pods.pop(uid), None)

    def _event(self, before: dict | None, after: dict | None) -> None:
        self.version += 1
        if after is not None:
            after["metadata"]["resourceVersion"] = str(self.version)
        self._history.append((self.version, before, after))
        if len(self._history) > HISTORY:
            self._oldest = self._history.pop(0)[0]
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def forget_history(self) -> None:
        """Compaction: no watch can begin at an earlier version."""
        self._history.clear()
        self._oldest = self.version

    def cut_watches(self) -> None:
        """Closes the connections of all watches."""
        for watch in self._watches:
            watch.scope.cancel()

    async def send_raw(self, data: bytes) -> None:
        """Sends these bytes to every watch, as a chunk."""
        for watch in list(self._watches):
            async with watch.lock:
                await watch.stream.send_all(_chunk(data))

    async def bookmark(self) -> None:
        thing = {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": str(self.version)},
        }
        await self.send_raw(_line("BOOKMARK", thing))

    async def expire_watches(self) -> None:
        """Sends every watch the event that its version is too old."""
        await self.send_raw(_line("ERROR", _status(410, "too old resource version")))

    @property
    def watches(self) -> int:
        return len(self._watches)

    def lists(self) -> int:
        return sum("watch" not in query for _, query, _ in self.requests)

    # The server.

    async def serve(self, *, task_status=trio.TASK_STATUS_IGNORED):
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        scheme = "https" if self._context else "http"
        self.url = f"{scheme}://127.0.0.1:{listener.socket.getsockname()[1]}"
        await trio.serve_listeners(self._connection, [listener], task_status=task_status)

    async def _connection(self, stream: trio.SocketStream) -> None:
        secure: trio.abc.Stream = stream
        if self._context is not None:
            secure = trio.SSLStream(stream, self._context, server_side=True, https_compatible=True)
        try:
            await self._answer(secure)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError):
            pass
        finally:
            await trio.aclose_forcefully(secure)

    async def _answer(self, stream: trio.abc.Stream) -> None:
        received = await RequestReader(stream).read()
        if received is None:
            return
        line, *lines = received[0].decode("latin-1").split("\r\n")
        fields = {
            name.lower(): value.strip()
            for name, _, value in (each.partition(":") for each in lines)
        }
        target = urlsplit(line.split(" ")[1])
        query = {key: values[0] for key, values in parse_qs(target.query).items()}
        self.requests.append((target.path, query, fields))
        if self.faults.silent:
            await trio.sleep_forever()
        status = self.faults.status or (self.faults.watch_status if "watch" in query else 0)
        if self.token and fields.get("authorization") != f"Bearer {self.token}":
            status = 401
        if status:
            await _send(stream, status, _status(status, f"pods is refused: {status}"))
        elif "watch" in query:
            await self._watch(stream, self._filter(target.path, query), query)
        else:
            await self._list(stream, self._filter(target.path, query), query)

    def _filter(self, path: str, query: dict[str, str]) -> Callable[[dict], bool]:
        selector = parse_selector(query.get("labelSelector", ""))
        parts = path.split("/")
        namespace = parts[4] if parts[3] == "namespaces" else ""

        def wanted(thing: dict) -> bool:
            metadata = thing["metadata"]
            return matches(selector, metadata["labels"]) and namespace in (
                "",
                metadata["namespace"],
            )

        return wanted

    async def _list(self, stream, wanted: Callable[[dict], bool], query: dict[str, str]) -> None:
        if (position := query.get("continue")) is not None:
            things = self._pages.pop(position, None)
            if things is None or self.faults.page_gone:
                self.faults.page_gone = False
                await _send(stream, 410, _status(410, "The provided continue parameter is too old"))
                return
        else:
            things = [thing for thing in self.pods.values() if wanted(thing)]
        metadata = {"resourceVersion": str(self.version)}
        limit = int(query.get("limit", "0"))
        if limit and len(things) > limit and not self.faults.ignore_limit:
            metadata["continue"] = f"page-{next(self._page_numbers)}"
            things, self._pages[metadata["continue"]] = things[:limit], things[limit:]
        listed = {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": things}
        if self.faults.cut_list:
            body = json.dumps(listed).encode()
            await stream.send_all(
                _HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[: self.faults.cut_list]
            )
            return
        await _send(stream, 200, listed)

    async def _watch(self, stream, wanted: Callable[[dict], bool], query: dict[str, str]) -> None:
        position = int(query.get("resourceVersion") or self.version)
        if position < self._oldest:
            await _send(stream, 410, _status(410, f"too old resource version: {position}"))
            return
        watch = _Watch(stream, wanted, position)
        self._watches.add(watch)
        try:
            await stream.send_all(_HEAD + b"transfer-encoding: chunked\r\n\r\n")
            with watch.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_events, watch)
                    while await stream.receive_some(1):  # until the client disconnects
                        pass
                    nursery.cancel_scope.cancel()
        finally:
            self._watches.discard(watch)

    async def _send_events(self, watch: _Watch) -> None:
        while True:
            changed = self._changed
            if not self.faults.without_events:
                await self._catch_up(watch)
            await changed.wait()

    async def _catch_up(self, watch: _Watch) -> None:
        for version, before, after in list(self._history):
            if version <= watch.position:
                continue
            watch.position = version
            matched = before is not None and watch.wanted(before)
            if after is not None and watch.wanted(after):
                line = _line("MODIFIED" if matched else "ADDED", after)
            elif matched:
                deleted = copy.deepcopy(before)
                deleted["metadata"]["resourceVersion"] = str(version)
                line = _line("DELETED", deleted)
            else:
                continue
            async with watch.lock:
                await watch.stream.send_all(_chunk(line))


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def _line(kind: str, thing: dict) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _status(code: int, message: str) -> dict:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "message": message,
    }


async def _send(stream, status: int, thing: dict) -> None:
    body = json.dumps(thing).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    await stream.send_all(head.encode() + body)
