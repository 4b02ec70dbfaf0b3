"""The load that a worker's engine tells in the head of a response.

The request asks for it (`UpstreamPool.asks_for_load`). Invariant: the field does not reach a client
that has not asked for it itself; one that has gets it as the engine wrote it. Of a worker with
data-parallel ranks nothing is asked: the field does not tell which of them it is about.
Source: real-engines.md 5.3.
"""

from __future__ import annotations

from omni_proxy.dataplane.upstream.pool import UpstreamPool
from omni_proxy.fleet.registry import Fleet
from omni_proxy.wire.load_report import (
    LOAD_FORMAT_LINE,
    NO_REPORT,
    EngineLoad,
    find_load_field,
    load_of_header,
    split_load_field,
)
from omni_proxy.wire.request import LOAD_HINT, RequestHead


def host_line_of(pool: UpstreamPool, head: RequestHead) -> bytes:
    """The pool's own lines of a request; where the client asks for the load, it alone asks."""
    if pool.asks_for_load and LOAD_HINT in head.hints:
        return pool.host_line.replace(LOAD_FORMAT_LINE, b"")
    return pool.host_line


def take_load(fleet: Fleet, pool: UpstreamPool, top: bytes) -> bytes:
    """A response's head as most engines write it, without the field, which is reported."""
    rest, value = split_load_field(top)
    if value:
        _report(fleet, pool, value)
    return rest


def read_load(fleet: Fleet, pool: UpstreamPool, top: bytes, head: RequestHead) -> bytes:
    """The same of any head; `head`: of the request."""
    rest, value = find_load_field(top)
    if value:
        _report(fleet, pool, value)
    return top if LOAD_HINT in head.hints else rest


def _report(fleet: Fleet, pool: UpstreamPool, value: bytes) -> None:
    report = load_of_header(value)
    worker = pool.worker
    if report != NO_REPORT and worker is not None and not worker.dp_ranks:
        fleet.loads.report(worker, EngineLoad(report, pool.loop.now))
