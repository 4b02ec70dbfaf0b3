"""Pods of Kubernetes as workers: decodes lists and watches, and tracks the pods of one source.

Invariants: at most one item of a list is decoded at a time; invalid JSON raises ValueError. After
`replace` and any events the endpoints are those of the pods that match, have not ended and are not
being deleted; only the order of events of the same pod matters. Invalid data in a pod excludes only
that pod, with a reason. Pure: times are arguments.
Source: Kubernetes API v1 `Pod`; note:features 9.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast, get_args

from omni_proxy.config.fields import Role
from omni_proxy.config.overlay import Discovered, FoundWorker
from omni_proxy.config.schema import WorkerEntry
from omni_proxy.config.tables.discover import DiscoverEntry, matches, parse_selector
from omni_proxy.config.url import normalize_url
from omni_proxy.discovery.endpoints import ReportedEndpoint, SourceEndpoint, SourceEndpoints
from omni_proxy.shared.engine_protocol import KvConnector
from omni_proxy.shared.origins import MAX_PORT

_BLANK: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()


def walk_list(text: str) -> Iterator[tuple[str, object]]:
    """Yields the keys and values of an object, and for the key `items` each item separately. Raises
    ValueError, after the valid part was yielded."""
    offset = _expect(text, 0, "{")
    if text[offset : offset + 1] == "}":
        return
    while True:
        key, offset = _value(text, offset)
        if not isinstance(key, str):
            raise ValueError("a key is not a string")
        offset = _expect(text, offset, ":")
        if key == "items" and text[offset : offset + 1] == "[":
            for item, after in _items(text, _blank(text, offset + 1)):
                offset = after
                if item is not None:
                    yield key, item
        else:
            value, offset = _value(text, offset)
            yield key, value
        if text[offset : offset + 1] == "}":
            return
        offset = _expect(text, offset, ",")


def _items(text: str, offset: int) -> Iterator[tuple[object, int]]:
    """Yields each item and the offset after it; at the end None and the offset after the list."""
    if text[offset : offset + 1] == "]":
        yield None, _blank(text, offset + 1)
        return
    while True:
        item, offset = _value(text, offset)
        yield item, offset
        if text[offset : offset + 1] == "]":
            yield None, _blank(text, offset + 1)
            return
        offset = _expect(text, offset, ",")


def _value(text: str, offset: int) -> tuple[object, int]:
    try:
        value, after = _DECODER.raw_decode(text, offset)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, _blank(text, after)


def _expect(text: str, offset: int, mark: str) -> int:
    """The offset after `mark` and blanks."""
    offset = _blank(text, offset)
    if text[offset : offset + 1] != mark:
        raise ValueError(f'expected "{mark}" at character {offset}')
    return _blank(text, offset + 1)


def _blank(text: str, offset: int) -> int:
    match = _BLANK.match(text, offset)
    return match.end() if match else offset


class LineBuffer:
    """Splits a stream into lines. Raises ValueError for a line of more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add data; returns the lines that are complete now, without empty ones."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"a line of more than {self._max_bytes} bytes")
        return [line for line in lines if line.strip()]


EventType: TypeAlias = Literal["ADDED", "MODIFIED", "DELETED"]
PREFIX: Final = "omni-proxy.dev/"
# Annotations in order of precedence: the proxy's own, then those of other routers.
PORTS: Final = (PREFIX + "port", "smg.ai/worker-ports")
BOOTSTRAP_PORTS: Final = (
    PREFIX + "bootstrap-port", "sglang.ai/bootstrap-port", "vllm.ai/bootstrap-port",
)  # fmt: skip
CONNECTORS: Final = (PREFIX + "kv-connector", "smg.ai/kv-connector")
ENDED: Final = ("Succeeded", "Failed")
GONE: Final = "its pod is gone"
DELETING: Final = "its pod is being deleted"
HAS_ENDED: Final = "its pod has ended"
UNSELECTED: Final = "the labels of its pod do not match any more"
NOT_READY: Final = "its pod is not ready"
MAX_PROBLEMS: Final = 1000


@dataclass(frozen=True, slots=True)
class Pod:
    """The relevant state of a pod. `reason`: why its workers that are not ready, or not in
    `endpoints`, get no requests; `problem`: why a matching pod has no endpoints."""

    uid: str
    name: str
    endpoints: tuple[ReportedEndpoint, ...] = ()
    reason: str = GONE
    problem: str = ""


class PodReader:
    """Reads pods by the rules of one `[[discover]]`."""

    def __init__(self, entry: DiscoverEntry) -> None:
        self._entry = entry
        self._selector = parse_selector(entry.selector)

    def read(self, pod: Mapping[str, object]) -> Pod | None:
        """None for an object without a uid."""
        metadata, status = _table(pod, "metadata"), _table(pod, "status")
        uid, namespace, name = (_text(metadata, key) for key in ("uid", "namespace", "name"))
        if not uid:
            return None
        title = f"{namespace}/{name}"
        if metadata.get("deletionTimestamp") is not None:
            return Pod(uid, title, reason=DELETING)
        if _text(status, "phase") in ENDED:
            return Pod(uid, title, reason=HAS_ENDED)
        if not matches(self._selector, _texts(metadata, "labels")):
            return Pod(uid, title, reason=UNSELECTED)
        if not _text(status, "podIP"):
            return Pod(uid, title, reason=NOT_READY)
        discovered = Discovered(self._entry.name, uid, namespace, name)
        ready = _is_ready(status)
        try:
            workers = [FoundWorker(entry, discovered) for entry in self._workers(pod)]
        except ValueError as error:
            return Pod(uid, title, reason=str(error), problem=str(error))
        return Pod(
            uid, title, tuple(ReportedEndpoint(worker, ready) for worker in workers), NOT_READY
        )

    def _workers(self, pod: Mapping[str, object]) -> Iterator[WorkerEntry]:
        """Raises ValueError for invalid annotations, labels or ports."""
        entry, metadata = self._entry, _table(pod, "metadata")
        labels, annotations = _texts(metadata, "labels"), _texts(metadata, "annotations")
        role = annotations.get(PREFIX + "role") or labels.get(entry.role_label) or entry.role
        if role and role not in get_args(Role):
            raise ValueError(f'"{role}" is not a role; use one of {", ".join(get_args(Role))}')
        connector = _first(annotations, CONNECTORS) or entry.kv_connector
        if connector and connector not in get_args(KvConnector):
            names = ", ".join(get_args(KvConnector))
            raise ValueError(f'"{connector}" is not a KV connector; use one of {names}')
        bootstrap = _first(annotations, BOOTSTRAP_PORTS)
        address = _text(_table(pod, "status"), "podIP")
        host = f"[{address}]" if ":" in address else address
        for port in self._ports(pod, annotations):
            yield WorkerEntry(
                url=normalize_url(f"http://{host}:{port}", allow_unix=False),
                model=annotations.get(PREFIX + "model")
                or labels.get(entry.model_label)
                or entry.model,
                capabilities=entry.capabilities,
                role=cast("Role", role),
                kv_connector=cast("KvConnector", connector),
                bootstrap_port=_port(bootstrap) if bootstrap and role in ("", "prefill") else 0,
            )

    def _ports(self, pod: Mapping[str, object], annotations: Mapping[str, str]) -> list[int]:
        """The distinct ports of the pod's workers. Raises ValueError."""
        ports_text = _first(annotations, PORTS) or str(self._entry.port)
        names = [name.strip() for name in ports_text.split(",")]
        ports = [_port(name) if name.isdecimal() else _named_port(pod, name) for name in names]
        return list(dict.fromkeys(ports))


class PodState:
    """The pods of one source. Each method returns the endpoints that it changed."""

    def __init__(self, entry: DiscoverEntry) -> None:
        self.endpoints = SourceEndpoints()
        self.problems: dict[str, str] = {}  # by name of the pod
        self._reader = PodReader(entry)
        self._problem_of: dict[str, str] = {}  # uid -> key in `problems`

    def read(self, pod: Mapping[str, object]) -> Pod | None:
        """Read a pod without changing the state; for lists that are processed in slices."""
        return self._reader.read(pod)

    def replace(self, pods: Iterable[Pod], now: float) -> list[SourceEndpoint]:
        """Apply a complete list."""
        self.problems.clear()
        self._problem_of.clear()
        listed = {pod.uid: pod for pod in pods}
        changed = []
        for pod in listed.values():
            changed += self._put(pod, now)
        gone = {endpoint.uid for endpoint in self.endpoints} - listed.keys()
        for uid in sorted(gone):
            changed += self.endpoints.put(uid, (), GONE, now)
        return changed

    def apply(self, kind: EventType, pod: Mapping[str, object], now: float) -> list[SourceEndpoint]:
        """Apply an event of a watch."""
        read = self._reader.read(pod)
        if read is None:
            return []
        if kind == "DELETED":  # also sent if its labels no longer match the selector
            read = Pod(read.uid, read.name, reason=read.reason if not read.endpoints else GONE)
        return self._put(read, now)

    def _put(self, pod: Pod, now: float) -> list[SourceEndpoint]:
        self.problems.pop(self._problem_of.pop(pod.uid, ""), None)
        if pod.problem and len(self.problems) < MAX_PROBLEMS:
            self.problems[pod.name] = pod.problem
            self._problem_of[pod.uid] = pod.name
        return self.endpoints.put(pod.uid, pod.endpoints, pod.reason, now)


def _is_ready(status: Mapping[str, object]) -> bool:
    conditions = status.get("conditions")
    return any(
        isinstance(condition, dict)
        and condition.get("type") == "Ready"
        and condition.get("status") == "True"
        for condition in (conditions if isinstance(conditions, list) else ())
    )


def _named_port(pod: Mapping[str, object], name: str) -> int:
    """The port with this name of a container or init container. Raises ValueError."""
    spec = _table(pod, "spec")
    for key in ("containers", "initContainers"):
        containers = spec.get(key)
        for container in containers if isinstance(containers, list) else ():
            ports = container.get("ports") if isinstance(container, dict) else None
            for port in ports if isinstance(ports, list) else ():
                if isinstance(port, dict) and port.get("name") == name:
                    return _port(str(port.get("containerPort")))
    raise ValueError(f'no container has a port named "{name}"')


def _port(text: str) -> int:
    """Raises ValueError."""
    if re.fullmatch("[0-9]{1,5}", text) and 1 <= int(text) <= MAX_PORT:
        return int(text)
    raise ValueError(f'"{text[:40]}" is not a port')


def _first(annotations: Mapping[str, str], names: Iterable[str]) -> str:
    return next((annotations[name] for name in names if annotations.get(name)), "")


def _table(value: Mapping[str, object], key: str) -> Mapping[str, object]:
    inner = value.get(key)
    return inner if isinstance(inner, dict) else {}


def _texts(value: Mapping[str, object], key: str) -> Mapping[str, str]:
    table = _table(value, key)
    return {name: text for name, text in table.items() if isinstance(text, str)}


def _text(value: Mapping[str, object], key: str) -> str:
    text = value.get(key)
    return text if isinstance(text, str) and text.isprintable() else ""  # the text may be logged
