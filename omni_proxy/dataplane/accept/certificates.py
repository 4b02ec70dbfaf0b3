"""The certificate that the listeners show, kept in step with its files.

Invariant: `context` is always one that works. A renewed pair on disk is taken within seconds and
without a change of FILE; a broken one is told of once, and the running one stays. Connections keep
what they began with.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final

import trio

from omni_proxy.config.problem import ConfigError
from omni_proxy.config.schema import ServerConfig
from omni_proxy.system.files import FileSignature, file_signature
from omni_proxy.system.tls_contexts import listener_tls_files, server_context

_log = logging.getLogger(__name__)

LOOK_SECS: Final = 2.0

State = tuple[FileSignature | None, ...]


class Certificates:
    """`context` is None while the listeners speak plain HTTP."""

    def __init__(self) -> None:
        self.context: ssl.SSLContext | None = None
        self.error = ""  # of the newest files, where they could not be taken
        self._server = ServerConfig()
        self._seen: State = ()  # the files' state when they were last read
        self._loaded_at = ""

    def prepare(self, new: ServerConfig) -> Callable[[], None]:
        """Read what `new` names; the result puts it in force. Raises ConfigError."""
        if not new.tls_cert:
            return partial(self._take, new, None, ())
        seen = _state(new)
        if self.context is not None and _named(new) == _named(self._server) and seen == self._seen:
            return partial(self._keep, new)
        return partial(self._take, new, server_context(new), seen)

    def _keep(self, new: ServerConfig) -> None:
        self._server = new

    def _take(self, new: ServerConfig, context: ssl.SSLContext | None, seen: State) -> None:
        self._server, self.context, self._seen, self.error = new, context, seen, ""
        self._loaded_at = datetime.now(UTC).isoformat()

    async def run(self) -> None:
        """Look at the files now and then, until cancelled."""
        while True:
            await trio.sleep(LOOK_SECS)
            if self.context is not None:
                await self._look()

    async def _look(self) -> None:
        """Read them anew where they have changed, and have stayed so since the last look."""
        server = self._server
        seen = await trio.to_thread.run_sync(_state, server)
        while seen != self._seen and server is self._server:
            await trio.sleep(LOOK_SECS / 4)  # one of the two may still be on its way
            before, seen = seen, await trio.to_thread.run_sync(_state, server)
            if seen == before:
                await self._renew(server, seen)

    async def _renew(self, server: ServerConfig, seen: State) -> None:
        try:
            context = await trio.to_thread.run_sync(server_context, server)
        except ConfigError as refused:
            if server is self._server:
                self._seen, self.error = seen, str(refused)
                _log.error(
                    "the renewed certificate is refused, keeping the current one: %s", refused
                )
            return
        if server is self._server:
            self._take(server, context, seen)
            _log.info("took the renewed certificate in %s", server.tls_cert)

    def status(self) -> dict[str, object] | None:
        if self.context is None:
            return None
        return {
            "certificate": self._server.tls_cert,
            "read_at": self._loaded_at,
            "clients_verified": self.context.verify_mode != ssl.CERT_NONE,
            "error": self.error or None,
        }


def _named(server: ServerConfig) -> tuple[object, ...]:
    return (*listener_tls_files(server), server.tls_client_require)


def _state(server: ServerConfig) -> State:
    return tuple(map(file_signature, listener_tls_files(server)))
