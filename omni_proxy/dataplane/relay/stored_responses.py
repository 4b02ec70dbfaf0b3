"""Records which worker stores a response of `/v1/responses`: its owner.

Contract: used only for routes that create such responses. The id of a response is recorded
before its bytes are sent to the client; chunks are relayed unchanged.
"""

from __future__ import annotations

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.relay.response_relay import BodyFraming
from omni_proxy.routing.pinning import ResponseIdScanner, ResponseOwners
from omni_proxy.routing.routes import RESPONSE_OWNER, Route


def creates_stored_response(route: Route) -> bool:
    """Whether responses of this route may be stored by their worker."""
    return route.pinning is RESPONSE_OWNER and bool(route.text)


def watch_response(io: ExchangeIO, exchange: Exchange) -> None:
    """Record the owner of the response to this request."""
    io.watch = ResponseWatch(io, exchange, io.services.balancer.response_owners)


class ResponseWatch:
    """Reads the response id from the body that is relayed for `exchange`."""

    __slots__ = ("_io", "_owners", "_scanner", "exchange")

    def __init__(self, io: ExchangeIO, exchange: Exchange, owners: ResponseOwners) -> None:
        self.exchange = exchange
        self._io = io
        self._owners = owners
        self._scanner = ResponseIdScanner(self._keep_owner)

    def begin(self, chunk: bytes, framing: BodyFraming | None) -> BodyFraming | None:
        """Read the first chunk, which may be empty. Returns the framing for the following chunks,
        which also reads them until the id is found."""
        scanner = self._scanner
        scanner.scan(chunk)
        if scanner.done:
            return framing
        wrap = bytes if framing is None else framing.wrap

        def read_and_wrap(piece: bytes) -> bytes:
            scanner.scan(piece)
            return wrap(piece)

        last = bytes if framing is None else framing.last
        delimits = framing is None or framing.self_delimiting
        return BodyFraming(read_and_wrap, last, self_delimiting=delimits)

    def _keep_owner(self, response_id: str) -> None:
        worker = self.exchange.worker
        if worker is not None and self.exchange.status < 400:
            self._owners.keep(response_id, worker, self._io.loop.now)
