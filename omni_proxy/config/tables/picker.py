"""The table `[picker]`: picking workers for requests that others send. Values only."""

from typing import Annotated

from msgspec import Meta, Struct

from omni_proxy.config.fields import Listen

ReservationLease = Annotated[float, Meta(gt=0, le=86400)]


class PickerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Picking workers for requests that Envoy or other programs send."""

    # For `omni-proxy picker`: address of Envoy's external processor, "host:port" or "unix:PATH";
    # empty: not served.
    grpc_listen: Listen = "127.0.0.1:9002"
    # PEM files of its certificate with the chain, and of the key; empty: no TLS.
    grpc_tls_cert: str = ""
    grpc_tls_key: str = ""
    # PEM file of CAs: if set, Envoy needs a certificate signed by one of them.
    grpc_tls_client_ca: str = ""
    # A reservation that is not released ends after this.
    lease_secs: ReservationLease = 120.0
