"""Aborts of requests in this process: ends those that wait, and finds the workers of the others.

Contract: no index of requests is kept. An abort searches the connections, so requests that are not
aborted cost nothing extra. A request that is found waiting never reaches a worker afterwards; a
running one must be aborted by its worker. Engines that use another id for it, as in two legs, are
called from here. After each `CONNECTIONS_PER_TURN` connections it yields to other tasks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import trio

from omni_proxy.admin_ops.abort_requests import AbortFindings, AbortTarget
from omni_proxy.dataplane.engine_calls import abort_legs
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.wire.aborted_reply import AbortedRequest, aborted_reply
from omni_proxy.wire.errors import HttpError

# Phases in which no worker has the request: between two attempts, and while a worker is dialled. In
# "prefill" only the prefill worker has it: an abort there would make the decode worker begin.
NOT_SENT: Final = frozenset(("queue", "backoff", "dial", "prefill"))
CONNECTIONS_PER_TURN: Final = 200  # bounds the time of one turn even if each needs a reply


async def abort_requests(
    services: ExchangeServices, target: AbortTarget, unix_secs: float
) -> AbortFindings:
    """End the waiting requests that match `target`. Returns the ids found, and the workers of the
    running ones.

    A request that begins during the search does not match. Running requests are not searched if
    `target` is everything.
    """
    match_ids, loop = target.matcher(), services.loop
    requested_at = loop.now
    waiting, found_ids = 0, set[str]()
    running: defaultdict[str, list[str]] = defaultdict(list)
    connections = [task for task in loop.tasks if isinstance(task, ExchangeIO)]
    in_flight = [(task, task.exchange) for task in connections if task.exchange is not None]
    for number, (task, exchange) in enumerate(in_flight, start=1):
        if number % CONNECTIONS_PER_TURN == 0:
            loop.flush()
            await trio.lowlevel.checkpoint()
        # An Exchange may be reused for the next request of its connection.
        ended = task.exchange is not exchange or exchange.started_at > requested_at
        if ended or exchange.route is None:
            continue
        waits = task.phase in NOT_SENT
        if not waits and (target.everything or exchange.worker is None):
            continue
        ids = _ids(exchange)
        matched = match_ids(ids)
        if not matched:
            continue
        found_ids.update(matched)
        if waits:
            waiting += 1
            task.throw(_reply(exchange, int(unix_secs)))
        elif exchange.worker is not None:
            running[exchange.worker.url] += ids
            prefill = exchange.legs.prefill if exchange.legs is not None else None
            if prefill is not None and prefill.worker is not None:
                running[prefill.worker.url] += ids
            abort_legs(services, exchange)
    loop.flush()
    by_url = {url: tuple(ids) for url, ids in running.items()}
    return AbortFindings(waiting, tuple(found_ids), by_url)


def _ids(exchange: Exchange) -> list[str]:
    """The ids of a request: the one of its head or its body, and each `rid` in its body."""
    need = exchange.requirements
    ids = [exchange.request_id.decode("latin-1")] if exchange.request_id else []
    return ids if need is None else [*ids, *need.rids]


def _reply(exchange: Exchange, made_at: int) -> HttpError:
    need, route = exchange.requirements, exchange.route
    error = aborted_reply(
        AbortedRequest(
            path=route.path if route is not None else "",
            request_id=exchange.request_id.decode("latin-1"),
            ids=need.rids if need is not None else (),
            model=(need.asked_model or "") if need is not None else "",
            stream=exchange.stream,
            made_at=made_at,
        )
    )
    error.close = need is None  # it waited for a slot: its body has not been read
    return error
