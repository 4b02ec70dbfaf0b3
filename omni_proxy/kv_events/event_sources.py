"""Publishers of KV events that engines report, for workers with `kv_events = "auto"`.

vLLM lists its publishers at /kv_event_sources, SGLang at /server_info. Invariant: nothing is
followed until the engine has reported its publishers; an engine without one is not queried again
until it becomes healthy again. Sources: real-engines.md 4 (which side binds), features.md 7.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from omni_proxy.fleet.worker import Worker
from omni_proxy.health.engine_pages import (
    SERVER_INFO,
    EnginePage,
    Fetch,
    PageReader,
    could_be_asked,
)

KV_EVENT_SOURCES: Final = EnginePage(("/kv_event_sources",), 15.0, 1024 * 1024)
MAX_RANKS: Final = 1024
_TCP: Final = re.compile(r"tcp://(.+):([0-9]{1,5})")


class EventSource(NamedTuple):
    """A publisher. `binds`: this proxy binds `endpoint`, and the publisher connects to it.

    `replay`: endpoint of its replay socket, or "".
    """

    endpoint: str
    binds: bool
    replay: str = ""


class EventSources(PageReader):
    """Reads publishers. `report(worker, sources)` gets one for each rank, in order, or none."""

    def __init__(self, report: Callable[[Worker, tuple[EventSource, ...]], None]) -> None:
        self._report = report

    def wants(self, worker: Worker) -> bool:
        return worker.kv_events == "auto"

    async def read(self, worker: Worker, fetch: Fetch) -> bool:
        host = host_of(worker)
        listed = await fetch(KV_EVENT_SOURCES)
        sources = vllm_sources(listed.json(), host) if listed.ok else ()
        if not sources:
            info = await fetch(SERVER_INFO)
            if not could_be_asked(info) or not could_be_asked(listed):
                return False
            sources = sglang_sources(info.json(), host) if info.ok else ()
        self._report(worker, sources)
        return True


def host_of(worker: Worker) -> str:
    """The host of the worker's URL, in the form of an endpoint."""
    address = worker.address
    host = "127.0.0.1" if isinstance(address, str) else address[0]
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def configured_source(endpoint: str, replay: str, rank: int) -> EventSource:
    """The source of the keys `kv_events` and `kv_replay`; with host `*` this proxy binds."""
    return EventSource(_shifted(endpoint, rank), "*" in endpoint, _shifted(replay, rank))


def vllm_sources(body: object, host: str) -> tuple[EventSource, ...]:
    """Sources in a response of /kv_event_sources, which has an entry for each rank."""
    if not isinstance(body, dict):
        return ()
    ranks = [body.get(str(rank)) for rank in range(min(len(body), MAX_RANKS))]
    sources = [_reported(entry, host) for entry in ranks if isinstance(entry, dict)]
    found = [source for source in sources if source is not None]
    return tuple(found) if len(found) == len(body) else ()


def sglang_sources(body: object, host: str) -> tuple[EventSource, ...]:
    """Sources in a response of /server_info: a list, or the first of consecutive ports."""
    events = body.get("kv_events") if isinstance(body, dict) else None
    if not isinstance(events, dict) or events.get("publisher") != "zmq":
        return ()
    listed = events.get("publishers")
    if isinstance(listed, list) and listed:
        found = [_reported(entry, host) for entry in listed if isinstance(entry, dict)]
        return tuple(source for source in found if source is not None)
    name, port = events.get("endpoint_host"), events.get("endpoint_port_base")
    ranks = events.get("dp_size", 1)
    if not isinstance(name, str) or type(port) is not int or type(ranks) is not int:
        return ()
    shown = f"[{name}]" if ":" in name and not name.startswith("[") else name
    replay = events.get("replay_endpoint")
    first = {"endpoint": f"tcp://{shown}:{port}", "replay_endpoint": replay}
    base = _reported(first, host)
    if base is None or not 1 <= ranks <= MAX_RANKS:
        return ()
    return tuple(
        base._replace(endpoint=_shifted(base.endpoint, rank), replay=_shifted(base.replay, rank))
        for rank in range(ranks)
    )


def _reported(entry: Mapping[str, object], host: str) -> EventSource | None:
    """A publisher as its engine reports it; None if it is off or unsupported.

    The publisher binds if its endpoint has `*` or `::`, or is ipc; otherwise it connects.
    """
    endpoint, replay = entry.get("endpoint"), entry.get("replay_endpoint")
    if entry.get("enable_kv_cache_events") is False or entry.get("publisher", "zmq") != "zmq":
        return None
    if not isinstance(endpoint, str) or not endpoint.startswith(("tcp://", "ipc://")):
        return None
    publisher_binds = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
    dialled = _dialled(replay, host) if isinstance(replay, str) else ""
    return EventSource(_dialled(endpoint, host), not publisher_binds, dialled)


def _dialled(endpoint: str, host: str) -> str:
    """The endpoint with an address that this machine can reach."""
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return endpoint
    everywhere = match[1] in ("*", "::", "[::]", "0.0.0.0")
    return f"tcp://{host if everywhere else match[1]}:{match[2]}"


def _shifted(endpoint: str, rank: int) -> str:
    match = _TCP.fullmatch(endpoint)
    return f"tcp://{match[1]}:{int(match[2]) + rank}" if match and rank else endpoint
