"""The table `[observe]`: traces. Values only."""

from typing import Annotated

from msgspec import Meta, Struct

from omni_proxy.config.fields import (
    OtlpEndpoint,
)


class ObserveConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Base URL of a trace collector: spans are sent to its /v1/traces by OTLP over HTTP; needs the
    # extra `otel`. Empty: no tracing.
    otlp_endpoint: OtlpEndpoint = ""
    # Share of traces that is sampled, if the client sends no traceparent; the sampling decision in
    # a traceparent is kept.
    trace_sampling: Annotated[float, Meta(ge=0, le=1)] = 1.0
