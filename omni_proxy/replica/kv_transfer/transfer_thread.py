"""The thread that transfers KVs: it runs a trio loop in parallel to the stage's thread.

Invariant: the stage's thread waits for this thread only at start and close. Tensors of a transfer
belong to this thread until it reports the end of the transfer. When `close` returns, the port is
free and no transfer runs.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVarTuple

import trio

from omni_proxy.replica.kv_transfer.export_table import Export, ExportTable
from omni_proxy.replica.kv_transfer.fetch import ByteBudget, Fetcher
from omni_proxy.replica.kv_transfer.serve import TransferServer
from omni_proxy.replica.kv_transfer.thread_messages import (
    Fetched,
    FetchFailed,
    FetchOrder,
    Leg,
    Post,
    ThreadEnded,
)
from omni_proxy.replica.kv_transfer.transfer_settings import TransferSettings
from omni_proxy.replica.kv_transfer.wire import TransferFailed
from omni_proxy.replica.models.kv import kv_bytes

log = logging.getLogger(__name__)

BACKLOG = 1024
CLOSE_SECS = 1.0
Arguments = TypeVarTuple("Arguments")


class TransferThread:
    """Created, started, called and closed by the stage's thread.

    A prefill replica's port is bound on creation; raises OSError if it is in use.
    """

    def __init__(self, settings: TransferSettings, name: str) -> None:
        self.settings = settings
        self.engine_id = secrets.token_hex(16)
        self.table = ExportTable(settings.max_bytes, settings.lease_secs, time.monotonic)
        self._listener = _listen(settings) if settings.role == "prefill" else None
        self._thread: threading.Thread | None = None
        self._name = name
        self._running = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()

    @property
    def address(self) -> tuple[str, int]:
        """The address advertised to decode replicas; port 0 if this replica serves no KV."""
        port = self._listener.getsockname()[1] if self._listener is not None else 0
        return self.settings.advertised, int(port)

    def start(self, post: Post) -> None:
        """Run until `close`; `post` is called from the thread."""
        self._thread = threading.Thread(
            target=self._run, args=(post,), name=self._name, daemon=True
        )
        self._thread.start()
        self._running.wait()

    def close(self) -> None:
        self._call(self._scope.cancel)
        if self._thread is not None:
            self._thread.join(CLOSE_SECS)
        if self._listener is not None:
            self._listener.close()

    # Prefill

    def announce(self, leg: Leg) -> None:
        self._call(self._server.announce, leg)

    def hand_over(self, leg: Leg, export: Export) -> None:
        self._call(self._server.hand_over, leg, export)

    def kept(self, key: str) -> None:
        self._call(self._server.kept, key)

    def withdraw(self, leg: Leg, reason: str) -> None:
        self._call(self._server.withdraw, leg, reason)

    # Decode

    def fetch(self, order: FetchOrder) -> None:
        """Start a fetch; its end is posted as `Fetched`, whose bytes the receiver must give back,
        or `FetchFailed`.
        """
        self._call(self._begin_fetch, order)

    def cancel(self, order: FetchOrder) -> None:
        """End the fetch if it still runs; its end may have been posted already."""
        self._call(self._cancel_fetch, order)

    def give_back(self, nbytes: int) -> None:
        self._call(self._budget.give_back, nbytes)

    # In the thread

    def _run(self, post: Post) -> None:
        reason = ""
        try:
            trio.run(self._main, post)
        except Exception as error:  # the stage is restarted
            log.exception("kv_thread_crashed")
            reason = f"{type(error).__name__}: {error}"
        if not self._scope.cancel_called:
            post(ThreadEnded(reason))
        self._running.set()

    async def _main(self, post: Post) -> None:
        self._post = post
        self._server = TransferServer(self.settings, self.table, self.engine_id, post)
        self._fetcher = Fetcher(self.settings)
        self._budget = ByteBudget(self.settings.max_bytes)
        self._fetches: dict[FetchOrder, trio.CancelScope] = {}
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                if self._listener is not None:
                    self._listener.setblocking(False)
                    await self._nursery.start(self._server.run, self._listener)
                self._token = trio.lowlevel.current_trio_token()
                self._running.set()
                await trio.sleep_forever()

    def _call(self, function: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(_guarded, function, arguments)

    def _begin_fetch(self, order: FetchOrder) -> None:
        self._fetches[order] = trio.CancelScope()
        self._nursery.start_soon(self._fetch, order)

    def _cancel_fetch(self, order: FetchOrder) -> None:
        if scope := self._fetches.get(order):
            scope.cancel()

    async def _fetch(self, order: FetchOrder) -> None:
        nbytes = kv_bytes(order.kv, order.tokens)
        taken = False
        try:
            with self._fetches[order]:
                await self._take(nbytes)
                taken = True
                logits, cached = await self._fetcher.fetch(order)
                taken = False  # the receiver of the KV returns the bytes to the budget
                self._post(Fetched(order, logits, cached))
        except TransferFailed as error:
            self._post(FetchFailed(order, str(error)))
        except Exception as error:  # a failed fetch must not end the others
            log.exception("kv_fetch_failed")
            self._post(FetchFailed(order, f"{type(error).__name__}: {error}"))
        finally:
            del self._fetches[order]
            if taken:
                self._budget.give_back(nbytes)

    async def _take(self, nbytes: int) -> None:
        """Raises TransferFailed."""
        secs = self.settings.wait_secs
        with trio.move_on_after(secs) as clock:
            await self._budget.take(nbytes)
        if clock.cancelled_caught:
            raise TransferFailed(
                f"no memory for the KV was free within {secs:g} s: raise --kv-max-bytes"
            )


def _guarded(function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """Call `function` and log its exception, which would otherwise end the thread's loop."""
    try:
        function(*arguments)
    except Exception:
        log.exception("kv_order_failed")


def _listen(settings: TransferSettings) -> socket.socket:
    """Raises OSError that names the port."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno,
            f"the bootstrap port {settings.port} of {settings.host}: {error.strerror}; choose "
            "another --bootstrap-port",
        ) from None
    return listener
