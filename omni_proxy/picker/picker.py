"""Picks workers for requests that other programs relay, with the services of the data plane.

Invariants: a pick is the same as for a relayed request with the same head and body. Its worker is
counted in the same counters until `release`, which undoes everything that `acquire` counted. It
never waits for a worker: if none can take the request, an error is raised immediately. A pair of
prefill and decode workers is picked only if the sender can use one (`PickRequest.takes_pair`). The
body of POST /select and /select_and_reserve is the model request with additional keys
(note:features 10), or has that request under `request`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from math import isfinite
from typing import Annotated, Final, TypeVar

import msgspec
import trio

from omni_proxy.dataplane.admission.caller_admission import begin_call, check_models_form, reserve
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.request_id import id_from_body
from omni_proxy.dataplane.finalize import finalize
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.dataplane.upstream.balancer import count_at
from omni_proxy.dataplane.upstream.fleet_requirements import (
    RequestParts,
    complete_requirements,
    pin_request,
)
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.worker import FAILED, SUCCEEDED, Worker
from omni_proxy.routing.inspect.large_json import ONE_PASS_BYTES, walk_large_json
from omni_proxy.routing.inspect.model_field import walk_model_spans
from omni_proxy.routing.inspect.requirements import (
    Requirements,
    has_json_body,
    inspect_request,
    requirements_of_large_json,
)
from omni_proxy.routing.model_aliases import choose_target, set_alias
from omni_proxy.routing.pick import pick_worker, unavailable
from omni_proxy.routing.routes import (
    DEFAULT_PATH,
    MethodNotAllowed,
    Route,
    find_route,
)
from omni_proxy.routing.weighted_split import AliasRequirement
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.wire.bounded_json import TooManyValues
from omni_proxy.wire.errors import HttpError, bad_request
from omni_proxy.wire.request import RequestHead, parse_request_head

MAX_LEASE_SECS: Final = 86400.0
MAX_ID_CHARS: Final = 256
_ABSENT: Final = msgspec.Raw()
# Headers that are replaced (the length), or that belong to a connection.
_NOT_COPIED: Final = frozenset(
    ("content-length", "transfer-encoding", "connection", "expect", "upgrade", "host")
)

Id = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)]


class PickRequest(msgspec.Struct, gc=False):
    """`session`: the affinity key, b"" to read it from head and body.

    `model`: the model if the body names none. `as_caller`: [[keys]] apply, as on a model route.
    `takes_pair`: the sender can pass the prefill worker's address to the decode worker.
    """

    head: RequestHead
    body: bytes
    session: bytes = b""
    model: str = ""
    client: str = "-"
    as_caller: bool = False
    takes_pair: bool = False


class _SelectBody(msgspec.Struct, gc=False):
    """The keys of a selection; other keys belong to the model request."""

    selection_id: Id = ""
    lease_secs: float | None = None
    path: str = DEFAULT_PATH
    session_id: str = ""
    model_name: str = ""
    headers: dict[str, str] = {}
    request: msgspec.Raw = _ABSENT


class Selection(msgspec.Struct, gc=False):
    """A parsed body of /select or /select_and_reserve; `lease_secs` None for the default."""

    request: PickRequest
    selection_id: str = ""
    lease_secs: float | None = None


_decode: Final = msgspec.json.Decoder(_SelectBody).decode


def read_selection(body: bytes) -> Selection:
    """Parse the body. Raises HttpError 400 with the key that is wrong."""
    try:
        fields = _decode(body or b"{}")
    except (*MALFORMED, TooManyValues) as error:
        raise bad_request(f"the body is not a selection: {error}", "invalid_json") from None
    lease = fields.lease_secs
    if lease is not None and not (isfinite(lease) and 0 < lease <= MAX_LEASE_SECS):
        raise bad_request(f"lease_secs must be a number above 0, up to {MAX_LEASE_SECS:g}")
    if fields.selection_id and not fields.selection_id.isprintable():
        raise bad_request("selection_id must be printable text")
    if not fields.path.startswith("/"):
        raise bad_request(f"path must be a model route, such as {DEFAULT_PATH}", "unknown_path")
    content = bytes(fields.request) if len(fields.request) else body
    request = PickRequest(
        head=head_of("POST", fields.path, fields.headers, len(content)),
        body=content,
        session=fields.session_id.strip(" \t").encode("utf-8", "surrogatepass"),
        model=fields.model_name,
    )
    return Selection(request, fields.selection_id, lease)


def head_of(method: str, target: str, headers: dict[str, str], length: int) -> RequestHead:
    """Build a request head from its parts. Raises HttpError 400."""
    lines = [f"{method} {target} HTTP/1.1", "host: picker", f"content-length: {length}"]
    names = set()
    for name, value in headers.items():
        lowered = name.lower()
        if lowered not in _NOT_COPIED:
            names.add(lowered)
            lines.append(f"{name}: {value}")
    if "content-type" not in names:
        lines.append("content-type: application/json")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1:
        raise bad_request("headers must not contain a line break")
    try:
        raw = text.encode("latin-1")
    except UnicodeEncodeError:
        raise bad_request("headers must be Latin-1") from None
    return parse_request_head(raw + b"\r\n\r\n")


Found = TypeVar("Found")


def _do_nothing() -> None:
    pass


class Picker:
    """`publish` is called after each change of a counter, for other processes that share them."""

    def __init__(
        self, services: ExchangeServices, publish: Callable[[], None] = _do_nothing
    ) -> None:
        self._services = services
        self._publish = publish

    @property
    def now(self) -> float:
        """The loop's time, updated here: policies use it, and it stops while no connection is
        served."""
        loop = self._services.loop
        loop.now = loop.clock()
        return loop.now

    async def inspect(self, request: PickRequest) -> Exchange:
        """Like `inspect_small`, for any body; other tasks run while a large body is read."""
        route = self._route_of(request)
        body, requirements = request.body, None
        if len(body) > ONE_PASS_BYTES and has_json_body(route, request.head):
            fields = await _in_slices(walk_large_json(body))
            requirements = requirements_of_large_json(route, fields, request.head)
            aliases = self._services.balancer.aliases
            split = aliases.find(requirements.model) if aliases is not None else None
            if split is not None and split.rewrite:
                spans = await _in_slices(walk_model_spans(body))
                requirements.alias = AliasRequirement(split, spans=spans)
        return self._inspected(request, route, requirements)

    def inspect_small(self, request: PickRequest) -> Exchange | None:
        """Inspect the request. Returns None if the body is too large; then call `inspect`.

        Raises HttpError if it is not a model request.
        """
        if len(request.body) > ONE_PASS_BYTES:
            return None
        return self._inspected(request, self._route_of(request))

    def _route_of(self, request: PickRequest) -> Route:
        method, _, path = request.head.log_words
        try:
            route = find_route(self._services.settings.routes, method, path)
        except MethodNotAllowed as error:
            raise error.as_http_error() from None
        if route is None:
            raise HttpError(404, f"{path} is no model route", "unknown_path")
        return route

    def _inspected(
        self, request: PickRequest, route: Route, requirements: Requirements | None = None
    ) -> Exchange:
        services, head, body = self._services, request.head, request.body
        now = self.now
        exchange = Exchange(now, request.client)
        exchange.head_at = exchange.body_at = now
        exchange.method, exchange.target, _ = head.log_words
        exchange.route, exchange.body, exchange.bytes_in = route, body, len(body)
        exchange.idempotency_key = head.idempotency_key
        if not request.as_caller or not services.settings.callers.guarded:
            self._require(request, exchange, requirements)
            return exchange
        try:
            begin_call(services.settings, exchange, head, now)
            self._require(request, exchange, requirements)
            need = exchange.requirements
            assert need is not None
            check_models_form(exchange, head)
            reserve(exchange, need, services.fleet, len(body), now)
        except HttpError as error:
            self.finish(exchange, error)
            raise error.with_headers(*self.rate_headers(exchange)) from None
        return exchange

    def rate_headers(self, exchange: Exchange) -> list[tuple[str, str]]:
        """Rate limit headers for the response, if the caller has rate limits."""
        caller = exchange.caller
        if caller is None or not caller.has_rates:
            return []
        lines = caller.rate_lines(self.now).decode("latin-1").split("\r\n")
        pairs = (line.partition(": ") for line in lines if line)
        return [(name, value) for name, _, value in pairs]

    def _require(
        self, request: PickRequest, exchange: Exchange, requirements: Requirements | None
    ) -> None:
        """Set the requirements of the exchange. Raises HttpError 400."""
        services, head, body, route = self._services, request.head, request.body, exchange.route
        assert route is not None
        need = requirements or inspect_request(route, body, head)
        balancer, fleet = services.balancer, services.fleet
        parts = RequestParts(
            route, (head.lines,), body, head.log_words[2], head.hints,
            session=request.session, takes_pair=request.takes_pair,
        )  # fmt: skip
        pin_request(balancer, fleet, need, parts, self.now)
        need.model = need.model or request.model or None
        exchange.request_id = head.request_id or id_from_body(need)
        exchange.requirements, exchange.stream = need, need.stream
        if balancer.aliases is not None and not need.large_body_class:
            set_alias(balancer.aliases, need, route, body, head)
        complete_requirements(balancer, fleet, need, parts)
        exchange.policy = balancer.policy.name

    def select(self, exchange: Exchange) -> Worker:
        """The worker or rank that the policy chooses now, without counting. Raises HttpError."""
        balancer, need = self._services.balancer, exchange.requirements
        assert need is not None
        _ = self.now
        try:
            if need.alias is not None:
                choose_target(need, balancer)
            owner = balancer.voices.owner
            return pick_worker(self._services.fleet, need, balancer.policy, owner=owner)
        except HttpError as error:
            raise _as_answer(error) from None

    def release_body(self, exchange: Exchange) -> None:
        """Release the body, which only the choice of a worker needs."""
        self._services.inflight.release_body(exchange)

    def acquire(self, exchange: Exchange, outside: Collection[Worker] = ()) -> Worker:
        """Count the exchange at the worker or rank that the policy chooses, except `outside`.

        If it raises HttpError, nothing is counted.
        """
        services, need = self._services, exchange.requirements
        assert need is not None
        _ = self.now
        if not services.inflight.admit(exchange):
            services.inflight.rejected += 1
            status = services.settings.config.server.overload_status
            raise HttpError(
                status, "router overloaded: max in-flight requests reached", status,
                type="overloaded_error", reason="max_inflight",
            ).with_headers(("retry-after", "1"))  # fmt: skip
        try:
            if outside and services.balancer.all_tried(need, outside):
                raise unavailable("subset_unavailable", "none among the allowed endpoints")
            worker = services.balancer.acquire(exchange, outside)
        except HttpError as error:
            self._dismiss(exchange)
            raise _as_answer(error) from None
        self._publish()
        return exchange.rank or worker

    def restore(self, target: Worker, path: str) -> Exchange:
        """Count a request, without limits, at the worker or rank where the old program acquired it.

        `path`: its model route.
        """
        exchange = Exchange(self.now, "-")
        exchange.method, exchange.target = "POST", path
        exchange.route = find_route(self._services.settings.routes, "POST", path)
        self._services.inflight.admit(exchange)
        worker = exchange.worker = target.worker
        count_at(target, 1)
        if isinstance(target, DpRank):
            exchange.rank = target
        exchange.weight_version = worker.weight_version
        self._publish()
        return exchange

    @staticmethod
    def prefill_of(exchange: Exchange) -> Worker | None:
        """The prefill worker of the exchange; None if it has one worker."""
        leg = exchange.legs.prefill if exchange.legs is not None else None
        return leg.worker if leg is not None else None

    def end_prefill(self, exchange: Exchange) -> None:
        """Release the prefill worker, when the response begins. A second call does nothing."""
        worker = self.prefill_of(exchange)
        if worker is not None and exchange.legs is not None and exchange.legs.prefill is not None:
            self._services.balancer.release(exchange.legs.prefill, worker, SUCCEEDED)
            if self._services.queue.waiting:
                self._services.queue.serve()
            self._publish()

    def release(self, exchange: Exchange, *, failed: bool = False) -> None:
        """Release all that was counted, when the request ends. A second call does nothing."""
        _ = self.now
        if exchange.worker is not None:
            result = FAILED if failed else SUCCEEDED
            self._services.balancer.release(exchange, exchange.worker, result)
        self._dismiss(exchange)

    def finish(self, exchange: Exchange, refusal: HttpError | None = None) -> None:
        """Like `release`, and also record metrics and logs as for a relayed request. Call it once.

        `refusal`: the error that was the response; without one, `exchange` has the outcome.
        """
        _ = self.now
        if refusal is not None:
            exchange.status = refusal.status
            exchange.end("refused", "proxy", str(refusal.code))
        finalize(self._services, exchange, "envoy")
        self._publish()

    def _dismiss(self, exchange: Exchange) -> None:
        self._services.inflight.dismiss(exchange)
        if self._services.queue.waiting:
            self._services.queue.serve()
        self._publish()


def _as_answer(error: HttpError) -> HttpError:
    """Make an unknown model a 404: no retry is expected here."""
    if error.code != "model_not_found":
        return error
    return HttpError(404, error.message, error.code)


async def _in_slices(walk: Generator[None, None, Found]) -> Found:
    while True:
        try:
            next(walk)
        except StopIteration as stop:
            result: Found = stop.value
            return result
        await trio.lowlevel.checkpoint()
