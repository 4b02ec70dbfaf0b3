"""A reservation as one program hands it over to the next in an upgrade. Values only."""

from __future__ import annotations

from msgspec import Struct


class ReservationRecord(Struct, frozen=True, kw_only=True):
    """`url`: of the worker or rank. `ends_at`: of its lease, by CLOCK_MONOTONIC. `path`: the model
    route that it is for."""

    reservation_id: str
    url: str
    ends_at: float
    path: str
