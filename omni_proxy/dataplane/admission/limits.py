"""The timeouts and limits of requests as numbers; 0 in the configuration means none."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from omni_proxy.config.schema import Config


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Timeouts in seconds, `inf` for none; `max_body` and `held` in bytes."""

    connect: float
    response_head: float
    first_byte: float
    idle: float
    client_idle: float
    client_head: float
    client_body: float
    total: float
    max_body: int
    held: int
    sse_keepalive: float


def limits_of(config: Config) -> AdmissionLimits:
    server, times = config.server, config.server.timeouts
    return AdmissionLimits(
        connect=times.connect_secs or inf,
        response_head=times.response_head_secs or inf,
        first_byte=times.first_byte_secs or times.idle_secs or inf,
        idle=times.idle_secs or inf,
        client_idle=times.client_idle_secs or inf,
        client_head=times.client_head_secs or inf,
        client_body=times.client_body_secs or inf,
        total=server.request_timeout_secs or inf,
        max_body=server.max_payload_size,
        held=server.max_held_bytes,
        sse_keepalive=server.sse_keepalive_secs,  # 0: none
    )
