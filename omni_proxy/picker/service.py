"""The picker service: selections and reservations over HTTP, and Envoy's external processor.

Contract: each reservation is released once: by its owner, by the end of its lease, or by the end of
the program; in an upgrade the next program owns them from `hand_over` on. `reservations` has the
bookkeeping; this module has the clock and the task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Final, Protocol

import trio

from omni_proxy.config.schema import Config
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.fleet.worker import Worker
from omni_proxy.picker.picker import Picker, Selection
from omni_proxy.picker.reservations import ReservationRecord, Reservations
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.wire.errors import HttpError

_log = logging.getLogger(__name__)

MAX_RESERVATIONS: Final = 100_000
MAX_SLEEP_SECS: Final = 3600.0


class EnvoyRun(Protocol):
    """The `run` method of a service: runs until cancelled."""

    async def __call__(self, *, task_status: trio.TaskStatus[None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """`target`: a worker, or a data-parallel rank. `model`: the target of an alias, otherwise None.

    `reservation_id`: None if the choice is not counted.
    """

    target: Worker
    model: str | None
    reservation_id: str | None = None
    lease_secs: float = 0.0


class EnvoyView(Protocol):
    """The methods of `ext_proc.service`, which is imported only if it is used."""

    def status(self) -> dict[str, object]: ...
    async def run(self, *, task_status: trio.TaskStatus[None]) -> None: ...
    def take_over(self) -> None: ...
    def begin_drain(self) -> None: ...
    async def drained(self) -> None: ...


class PickerService:
    """`config`: returns the current configuration."""

    def __init__(self, picker: Picker, config: Callable[[], Config]) -> None:
        self._picker = picker
        self._config = config
        self._reservations: Reservations[Exchange] = Reservations()
        self._envoy: EnvoyView | None = None  # set by `omni-proxy picker`
        self._changed = trio.Event()  # set if a lease may end before the task wakes up
        self._restored = trio.Event()  # set unless reservations of another program are awaited
        self._restored.set()
        self.successor = ""  # admin socket path of the program that took over the reservations

    def serve_envoy(self, services: ExchangeServices, config_store: ConfigStore) -> None:
        """Add Envoy's external processor, which the caller runs: see `services`.

        It needs the packages of the extra `picker`, so the import is local.
        """
        from omni_proxy.picker.ext_proc.service import EnvoyService

        self._envoy = EnvoyService(self._picker, services, config_store)

    @property
    def services(self) -> list[tuple[str, EnvoyRun]]:
        """Further services to run, with their names."""
        envoy = self._envoy
        return [] if envoy is None else [("envoy", envoy.run)]

    @property
    def listens(self) -> bool:
        """Whether the gRPC server listens, or is not configured."""
        address = self._config().picker.grpc_listen
        envoy = self._envoy
        return envoy is None or not address or envoy.status()["grpc_listen"] is not None

    def take_over(self) -> None:
        """Another program still runs: share its address, and let callers wait for `restore`."""
        self._restored = trio.Event()
        if self._envoy is not None:
            self._envoy.take_over()

    def restore(self, records: Sequence[ReservationRecord], targets: Mapping[str, Worker]) -> None:
        """Add handed-over reservations, except those at workers that no longer exist."""
        for record in records:
            target = targets.get(record.url)
            if target is not None and record.reservation_id not in self._reservations:
                exchange = self._picker.restore(target, record.path)
                self._reservations.add(record.reservation_id, exchange, record.ends_at)
        self._restored.set()
        self._changed.set()

    def hand_over(self, successor: str) -> tuple[ReservationRecord, ...]:
        """Release all reservations here and return them; later calls belong to `successor`."""
        self.successor = successor
        records = tuple(
            ReservationRecord(
                reservation_id=name, url=target.url, ends_at=ends_at, path=_path(exchange)
            )
            for name, exchange, ends_at in self._reservations.rows()
            if (target := exchange.sent_to) is not None
        )
        self._release_all()
        return records

    def begin_drain(self) -> None:
        """Accept no new requests of Envoy; running ones continue."""
        if self._envoy is not None:
            self._envoy.begin_drain()

    async def drained(self) -> None:
        """Wait until Envoy's last request has ended. The caller sets a timeout."""
        if self._envoy is not None:
            await self._envoy.drained()

    async def select(self, selection: Selection) -> Choice:
        """Choose a worker without counting. Raises HttpError."""
        exchange = await self._picker.inspect(selection.request)
        return Choice(self._picker.select(exchange), _target_model(exchange))

    async def reserve(self, selection: Selection) -> Choice:
        """Reserve a worker. Raises HttpError, 409 for an id in use."""
        await self._restored.wait()
        exchange = await self._picker.inspect(selection.request)
        reservation_id = selection.selection_id or token_hex(16)
        self._refuse_unless_new(reservation_id)
        target = self._picker.acquire(exchange)
        self._picker.release_body(exchange)
        lease = selection.lease_secs or self._config().picker.lease_secs
        before = self._reservations.next_end()
        self._reservations.add(reservation_id, exchange, self._picker.now + lease)
        if self._reservations.next_end() < before:
            self._changed.set()
        return Choice(target, _target_model(exchange), reservation_id, lease)

    async def release(self, reservation_id: str) -> None:
        """Release a reservation. Raises HttpError 404 if the id is unknown or its lease ended."""
        await self._restored.wait()
        exchange = self._reservations.release(reservation_id)
        if exchange is None:
            message = f"no reservation {reservation_id!r}: it was released, or its lease has ended"
            raise HttpError(404, message, "unknown_reservation")
        self._picker.release(exchange)

    def status(self) -> dict[str, object]:
        counts: dict[str, object] = {
            "reservations": len(self._reservations),
            "expired": self._reservations.expired,
        }
        return counts if self._envoy is None else {**counts, **self._envoy.status()}

    def _refuse_unless_new(self, reservation_id: str) -> None:
        reservation = self._reservations.get(reservation_id)
        if reservation is not None:
            target = reservation.sent_to
            where = f" at {target.url}" if target is not None else ""
            raise HttpError(
                409, f"the reservation {reservation_id!r} already exists{where}; release it, or "
                "choose another selection_id", "reservation_exists",
            )  # fmt: skip
        if len(self._reservations) >= MAX_RESERVATIONS:
            raise HttpError(
                503, f"there are already {MAX_RESERVATIONS} reservations", "too_many_reservations"
            ).with_headers(("retry-after", "1"))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Release expired reservations until cancelled, then all of them."""
        task_status.started()
        try:
            while True:
                self._expire()
                self._changed = trio.Event()
                secs = self._reservations.next_end() - self._picker.now
                with trio.move_on_after(min(max(secs, 0.0), MAX_SLEEP_SECS)):
                    await self._changed.wait()
        finally:
            self._release_all()

    def _expire(self) -> None:
        expired = self._reservations.expire(self._picker.now)
        for exchange in expired:
            self._picker.release(exchange)
        if expired:
            _log.warning("reservations_expired count=%d", len(expired))

    def _release_all(self) -> None:
        for exchange in self._reservations.take_all():
            self._picker.release(exchange)


def _path(exchange: Exchange) -> str:
    return exchange.target.partition("?")[0]


def _target_model(exchange: Exchange) -> str | None:
    return exchange.requirements.target_model if exchange.requirements is not None else None
