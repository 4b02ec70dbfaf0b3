"""The table `[picker]`: workers for requests that the proxy does not carry. Values only."""

from typing import Annotated

from msgspec import Meta, Struct

ReservationLease = Annotated[float, Meta(gt=0, le=86400)]


class PickerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choosing workers for others that send the requests."""

    # A reservation that nobody releases ends after this.
    lease_secs: ReservationLease = 120.0
