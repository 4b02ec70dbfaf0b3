"""Hypercorn's connections as both of our servers want them: the front's and the replica's.

Invariant: one whose client has left is closed at once, and the last piece of an answer is sent
without being cancelled from inside. Which sockets, how long, and what ends them is the servers'.
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
    """Hypercorn's would wait out its keep-alive timeout for the next request of a client that left.

    What is just being answered is told of it by Hypercorn, and ends by itself.
    """

    _left = False

    async def protocol_send(self, event: Event) -> None:
        if not (self._left and isinstance(event, Updated)):  # else it would be idle once more
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        await super()._read_data()
        self._left = True
        await self.idle_task.stop()


def protect_last_send(
    app: QuartTrio,
) -> Callable[[Scope, ASGIReceiveCallable, ASGISendCallable], Awaitable[None]]:
    """The app, whose answers' last piece nobody cancels.

    quart-trio's receiver reacts to Hypercorn's `http.disconnect`, which comes before Hypercorn has
    ended the exchange, by cancelling the very task that ends it; the connection would neither
    close nor go on.
    """

    async def call(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_whole(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                with trio.move_on_after(LAST_SEND_SECS, shield=True):
                    await send(message)
            else:
                await send(message)

        await app(scope, receive, send_whole)

    return call


def first_leaf_error(fault: BaseException) -> BaseException:
    """The one to tell of, out of the groups that nurseries make of it."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault
