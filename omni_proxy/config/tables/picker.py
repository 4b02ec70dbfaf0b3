"""The table `[picker]`: workers for requests that the proxy does not carry. Values only."""

from typing import Annotated

from msgspec import Meta, Struct

from omni_proxy.config.fields import Listen

ReservationLease = Annotated[float, Meta(gt=0, le=86400)]


class PickerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choosing workers for requests that other programs relay."""

    # Of `omni-proxy picker`: where Envoy's external processor is served, "host:port" or
    # "unix:PATH"; empty: nowhere.
    grpc_listen: Listen = "127.0.0.1:9002"
    # PEM files of its certificate with the chain, and of the key; empty: no TLS.
    grpc_tls_cert: str = ""
    grpc_tls_key: str = ""
    # PEM file of authorities: Envoy then needs a certificate that one of them signed.
    grpc_tls_client_ca: str = ""
    # A reservation that nobody releases ends after this.
    lease_secs: ReservationLease = 120.0
