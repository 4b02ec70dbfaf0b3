"""Changes to Hypercorn's connections, for the admin API and for the replica's server.

Invariant: a connection whose client has disconnected is closed at once, and the last chunk of a
response is sent without being cancelled by quart-trio.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio
from hypercorn.events import Event, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from quart_trio import QuartTrio

LAST_SEND_SECS: Final = 30


class HypercornConnection(TCPServer):
    """Hypercorn waits its keep-alive timeout for the next request of a client that disconnected.

    This ends the wait; a request that is being answered is notified by Hypercorn.
    """

    _disconnected = False

    async def protocol_send(self, event: Event) -> None:
        if not (
            self._disconnected and isinstance(event, Updated)
        ):  # it would start the keep-alive timeout again
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        await super()._read_data()
        self._disconnected = True
        await self.idle_task.stop()


def protect_last_send(
    app: QuartTrio,
) -> Callable[[Scope, ASGIReceiveCallable, ASGISendCallable], Awaitable[None]]:
    """The app, with the last chunk of each response shielded from cancellation.

    quart-trio's receiver reacts to Hypercorn's `http.disconnect`, which comes before Hypercorn has
    ended the exchange, by cancelling the very task that ends it; the connection would neither
    close nor go on.
    """

    async def call(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_shielded(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                with trio.move_on_after(LAST_SEND_SECS, shield=True):
                    await send(message)
            else:
                await send(message)

        await app(scope, receive, send_shielded)

    return call


def first_leaf_error(error: BaseException) -> BaseException:
    """The first error inside the exception groups that nurseries raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
