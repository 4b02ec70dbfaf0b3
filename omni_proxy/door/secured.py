"""A client connection over TLS: its handshake, and then the life of any other.

Invariant: nothing is read as a request before the handshake is over, which `client_head_secs`
bounds. Whoever speaks plain HTTP here is told so, in plain HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from typing import TYPE_CHECKING

from omni_proxy.door.connection import Connection
from omni_proxy.door.introduction import introduce
from omni_proxy.door.refusing import refuse_head
from omni_proxy.door.task import Expired, Gone, nested
from omni_proxy.door.tls import RECORD, Handshake, TlsConn, more
from omni_proxy.watch.trust import reason_of
from omni_proxy.wire.errors import Refusal

if TYPE_CHECKING:
    import socket

    from omni_proxy.door.core import Door

_log = logging.getLogger(__name__)


class TlsConnection(Connection):
    """`context` is the one that counts at the moment of accepting."""

    __slots__ = ("_context",)

    def __init__(self, door: Door, sock: socket.socket, peer: str, context: ssl.SSLContext) -> None:
        super().__init__(door, sock, peer)
        self._context = context

    async def serve(self) -> None:
        self.clock("handshake", self.door.limits.client_head)
        plain = self.client
        try:
            self.client = await self._shaken()
        except Refusal as refusal:
            self.phase = "head"
            with contextlib.suppress(OSError):  # whoever would be told is not there any more
                await refuse_head(self, refusal)
            return
        except (Gone, Expired, OSError) as error:
            self.door.failed_handshakes += 1
            told = f"no end within time (phase {error})" if isinstance(error, Expired) else ""
            _log.debug("TLS handshake with %s failed: %s", self.peer, told or reason_of(error))
            return
        finally:
            if self.client is plain:
                plain.close()
        await nested(super().serve())

    async def _shaken(self) -> TlsConn:
        if not self.introduced:
            await introduce(self)
            self.clock("handshake", self.door.limits.client_head)
        first = await more(self, self.client)
        if first[:1] != RECORD and first[:1].isalpha():
            raise Refusal(
                400, "this listener speaks TLS, and plain HTTP came: use https://",
                "plain_http_on_tls_port", close=True,
            )  # fmt: skip
        shake = Handshake(self._context)
        shake.incoming.write(first)
        return await shake.run(self, self.client)


class AdminConnection(Connection):
    """Of the [admin] listener: everything goes to the control routes."""

    __slots__ = ()

    front_only = True


class TlsAdminConnection(TlsConnection):
    __slots__ = ()

    front_only = True
