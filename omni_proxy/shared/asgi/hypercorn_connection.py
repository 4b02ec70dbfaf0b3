"""Changes to Hypercorn's connections, for the admin API and for the replica's server.

Invariant: a connection whose client has disconnected is closed immediately, and quart-trio does not
cancel the sending of a response's last chunk.
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
    """A Hypercorn connection that closes when its client disconnects.

    Hypercorn would wait for its next request until the keep-alive timeout; this ends the wait.
    Hypercorn itself notifies a request in progress.
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

    Hypercorn sends `http.disconnect` before it has ended the exchange. quart-trio's receiver then
    cancels the task that is ending it, and the connection would neither close nor continue.
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
