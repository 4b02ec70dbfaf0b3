"""Picks for Envoy's requests, in trio's thread: begin, reply with a destination, end.

Contract: `begin` replies exactly once, and doesn't block; after `end` the request is not counted
any more, also if `end` comes before the pick has ended. Both are called in the order of Envoy's
messages, and never raise: trio calls them, and an exception would end the program. Destinations are
`ip:port`, with a cache of resolved host names: an entry older than `FRESH_SECS` is resolved again;
if that fails, it is used for another `FRESH_SECS`. The owner calls `forget_all_but` after changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from ipaddress import ip_address
from typing import Final

import msgspec
import trio

from omni_proxy.api_keys.caller_lookup import KEY_FIELDS
from omni_proxy.dataplane.attempt.attempt import changed_parts
from omni_proxy.dataplane.attempt.outlier_reports import report_end, report_failure
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.worker import Worker
from omni_proxy.picker.ext_proc.messages import PREFILLER, Destination
from omni_proxy.picker.ext_proc.stream import ProxiedRequest
from omni_proxy.picker.picker import Picker, PickRequest, head_of
from omni_proxy.upstream_http.credentials import API_KEY_HEADER, bearer, own_key
from omni_proxy.upstream_http.resolver import RefusedAddress, addresses
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.header_fields import RANK_NAME

_log = logging.getLogger(__name__)

FRESH_SECS: Final = 10.0
Address = tuple[str, int]


class Endpoints:
    """The cache. `clock`: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[Address, tuple[float, tuple[str, ...]]] = {}

    def known(self, worker: Worker) -> tuple[str, ...] | None:
        """The worker's endpoints; None if its name must be resolved first, () for a Unix socket."""
        address = worker.worker.address
        if isinstance(address, str):  # a Unix socket
            return ()
        entry = self._found.get(address)
        if entry is not None:
            return entry[1] if self._clock() < entry[0] else None
        try:
            ip_address(address[0])
        except ValueError:
            return None
        endpoints = (_text(*address),)
        self._found[address] = (float("inf"), endpoints)
        return endpoints

    def newest(self, worker: Worker) -> tuple[str, ...]:
        """The worker's last resolved endpoints, of any age; () if there are none."""
        address = worker.worker.address
        entry = None if isinstance(address, str) else self._found.get(address)
        return entry[1] if entry is not None else ()

    async def resolve(self, worker: Worker) -> tuple[str, ...]:
        """The worker's endpoints, resolved by DNS if needed. Raises HttpError 503."""
        known_endpoints = self.known(worker)
        address = worker.worker.address
        if known_endpoints is not None or isinstance(address, str):
            return known_endpoints or ()
        try:
            resolved = await addresses(*address)
        except (OSError, RefusedAddress) as error:
            before = self._found.get(address)
            if before is None:
                raise HttpError(
                    503, f"the worker's name can't be resolved: {error}", "worker_unresolved"
                ) from None
            self._found[address] = (self._clock() + FRESH_SECS, before[1])
            return before[1]
        endpoints = tuple(_text(*resolved_address) for resolved_address in resolved)
        self._found[address] = (self._clock() + FRESH_SECS, endpoints)
        return endpoints

    def outside(self, workers: Iterable[Worker], subset: Collection[str]) -> set[Worker]:
        """The workers without an endpoint in `subset`."""
        return {worker for worker in workers if not set(self.known(worker) or ()) & set(subset)}

    def __len__(self) -> int:
        return len(self._found)

    def forget_all_but(self, workers: Iterable[Worker]) -> None:
        worker_addresses = {worker.address for worker in workers}
        for address in [address for address in self._found if address not in worker_addresses]:
            del self._found[address]


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


FAILED_STATUSES: Final = (502, 504)
Reply = Callable[[Destination | HttpError], None]


class ResponseFacts(msgspec.Struct, gc=False):
    """Facts about a response. Times are of `time.monotonic`, 0.0 if the event didn't occur."""

    status: int = 0
    complete: bool = False
    head_at: float = 0.0
    first_at: float = 0.0
    chunks: int = 0
    bytes_out: int = 0
    last_chunk: bytes = b""


class Ticket:
    """One request. `exchange`: set while it is counted. `ended`: trio's thread has ended it.

    `handed_back`: the asyncio thread has reported its end.
    """

    __slots__ = ("ended", "exchange", "handed_back")

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.ended = self.handed_back = False


class EnvoyPicks:
    """Makes picks. `nursery` has the tasks of picks that can't be answered immediately."""

    def __init__(self, picker: Picker, services: ExchangeServices, nursery: trio.Nursery) -> None:
        self._picker = picker
        self._services = services
        self._nursery = nursery
        self.endpoints = Endpoints(services.loop.clock)
        self._revision = services.fleet.revision  # the fleet's revision at the last cleanup

    def begin(self, ticket: Ticket, proxied: ProxiedRequest, reply: Reply) -> None:
        try:
            request = request_of(proxied)
            if self._all_resolved(proxied):
                exchange = self._picker.inspect_small(request)
                if exchange is not None:
                    self._acquire(ticket, exchange, proxied, reply)
                    return
        except HttpError as error:
            reply(error)
        except Exception:
            _log.exception("pick_failed")
            reply(_internal_error())
        else:
            self._nursery.start_soon(self._resolve_and_acquire, ticket, request, proxied, reply)

    async def _resolve_and_acquire(
        self, ticket: Ticket, request: PickRequest, proxied: ProxiedRequest, reply: Reply
    ) -> None:
        """Begin a pick with a large body, or with a subset and unresolved host names."""
        try:
            for worker in self._services.fleet.workers if proxied.subset is not None else ():
                if self.endpoints.known(worker) is None:
                    await self._try_to_resolve(worker)
            exchange = await self._picker.inspect(request)
            self._acquire(ticket, exchange, proxied, reply)
        except HttpError as error:
            reply(error)
        except Exception:
            _log.exception("pick_failed")
            reply(_internal_error())

    def _all_resolved(self, proxied: ProxiedRequest) -> bool:
        endpoints_of = self.endpoints.known
        workers = self._services.fleet.workers if proxied.subset is not None else ()
        return all(endpoints_of(worker) is not None for worker in workers)

    async def _try_to_resolve(self, worker: Worker) -> None:
        try:
            await self.endpoints.resolve(worker)
        except HttpError as error:
            _log.warning("worker_unresolved worker=%s error=%s", worker.url, error.message)

    def _acquire(
        self, ticket: Ticket, exchange: Exchange, proxied: ProxiedRequest, reply: Reply
    ) -> None:
        """Acquire a worker, and reply. If it raises HttpError, the request is not counted."""
        fleet, outside = self._services.fleet, set[Worker]()
        if fleet.revision != self._revision:
            self._revision = fleet.revision
            self.endpoints.forget_all_but(fleet.workers)
        if proxied.subset is not None:
            outside = self.endpoints.outside(fleet.workers, proxied.subset)
        try:
            target = self._picker.acquire(exchange, outside)
        except HttpError as error:
            self._picker.finish(exchange, error)
            raise error.with_headers(*self._picker.rate_headers(exchange)) from None
        ticket.exchange = exchange
        exchange.sent_at = self._services.loop.now
        if ticket.ended:  # it was ended while a large body was read
            self._end_exchange(ticket, ResponseFacts())
            return
        prefill = self._picker.prefill_of(exchange)
        both = (target,) if prefill is None else (target, prefill)
        if any(self.endpoints.known(worker) is None for worker in both):
            self._nursery.start_soon(self._resolve_and_reply, ticket, both, proxied, reply)
            return
        self._reply(ticket, both, proxied, reply)

    async def _resolve_and_reply(
        self, ticket: Ticket, targets: Sequence[Worker], proxied: ProxiedRequest, reply: Reply
    ) -> None:
        try:
            for target in targets:
                await self.endpoints.resolve(target)
        except HttpError as error:
            self._refuse(ticket, error, reply)
            return
        self._reply(ticket, targets, proxied, reply)

    def _reply(
        self, ticket: Ticket, targets: Sequence[Worker], proxied: ProxiedRequest, reply: Reply
    ) -> None:
        """Reply with a destination. `targets`: the worker, and its prefill worker, if any."""
        exchange = ticket.exchange
        if exchange is None:  # the stream has ended
            return
        endpoints_by_target = [self.endpoints.newest(target) for target in targets]
        for target, endpoints in zip(targets, endpoints_by_target, strict=True):
            if not endpoints:
                message = f"Envoy can't reach {target.url}: it has no network address"
                self._refuse(ticket, HttpError(503, message, "worker_unresolved"), reply)
                return
        subset = proxied.subset
        endpoint, *prefill = (
            next(
                (candidate for candidate in endpoints if subset is None or candidate in subset),
                endpoints[0],
            )
            for endpoints in endpoints_by_target
        )
        destination = self._destination(exchange, targets[0], endpoint, prefill)
        self._services.inflight.release_body(exchange)
        reply(destination)

    def _destination(
        self, exchange: Exchange, target: Worker, endpoint: str, prefill: Sequence[str]
    ) -> Destination:
        headers = {PREFILLER: prefill[0]} if prefill else {}
        removed: tuple[str, ...] = () if prefill else (PREFILLER,)  # a client must not set it
        worker = target.worker
        if isinstance(target, DpRank):
            headers[RANK_NAME.decode()] = str(target.index)
        key = own_key(worker)
        if key:
            headers |= bearer(key)
            removed += (API_KEY_HEADER,)
        elif self._services.settings.callers.keyed:
            removed += tuple(sorted(name.decode() for name in KEY_FIELDS))
        parts = changed_parts(exchange)
        body = None if parts is None else b"".join(parts)
        rates = self._picker.rate_headers(exchange)
        return Destination(endpoint, headers, removed, body, rates)

    def _refuse(self, ticket: Ticket, error: HttpError, reply: Reply) -> None:
        exchange, ticket.exchange = ticket.exchange, None
        if exchange is not None:
            self._picker.finish(exchange, error)
        reply(error)

    def begin_response(self, ticket: Ticket) -> None:
        """The response head has arrived: release the prefill worker."""
        try:
            if ticket.exchange is not None:
                self._picker.end_prefill(ticket.exchange)
        except Exception:
            _log.exception("pick_prefill_end_failed")

    def end(self, ticket: Ticket, facts: ResponseFacts) -> None:
        """The response is complete, or the stream has ended. A second call does nothing."""
        try:
            self._end_exchange(ticket, facts)
        except Exception:
            _log.exception("pick_end_failed")

    def _end_exchange(self, ticket: Ticket, facts: ResponseFacts) -> None:
        ticket.ended = True
        exchange, ticket.exchange = ticket.exchange, None
        if exchange is None:
            return
        services, worker = self._services, exchange.worker
        exchange.status, exchange.response_head_at = facts.status, facts.head_at
        exchange.first_at, exchange.chunks = facts.first_at, facts.chunks
        exchange.bytes_out, exchange.relayed = facts.bytes_out, facts.status > 0
        if services.settings.keeps_last_chunk or exchange.reads_usage():
            exchange.last_chunk = facts.last_chunk
        if facts.complete:
            exchange.end("completed", "")
        else:
            exchange.end_by_client()
        if facts.status:
            self._picker.end_prefill(exchange)
        if worker is not None:
            self._report(exchange, worker)
        self._picker.finish(exchange)

    def _report(self, exchange: Exchange, worker: Worker) -> None:
        """Report the response's result to the fleet, and changes of voices.

        A 503 is ignored: it comes from Envoy for an unreachable worker, or from a busy worker.
        Health probes distinguish these.
        """
        services, status = self._services, exchange.status
        if status in FAILED_STATUSES:
            report_failure(services.fleet, exchange, worker, f"HTTP {status}", status)
            return
        report_end(services, exchange, worker)


def request_of(proxied: ProxiedRequest) -> PickRequest:
    """Raises HttpError 400 for a head that would not be relayed."""
    headers = {name: value for name, value in proxied.headers.items() if not name.startswith(":")}
    method, target = proxied.headers.get(":method", ""), proxied.headers.get(":path", "")
    client = headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    return PickRequest(
        head=head_of(method, target, headers, len(proxied.body)),
        body=proxied.body,
        client=client or "-",
        as_caller=True,
        takes_pair=True,
    )


def _internal_error() -> HttpError:
    return HttpError(500, "the picker has failed; see its log", "picker_failed")
