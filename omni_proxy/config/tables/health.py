"""The table `[health]`: probes of workers. Values only."""

from typing import Literal

from msgspec import Struct

from omni_proxy.config.fields import (
    AtLeastOne,
    Duration,
    Endpoint,
    Interval,
)


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Path to probe on the worker; healthy is 200.
    endpoint: Endpoint = "/health"
    # Between two probes of one worker; at most 10 s if it is out of rotation.
    interval_secs: Interval = 10.0
    # Timeout of one probe.
    timeout_secs: Interval = 5.0
    # Failed probes in a row until a worker leaves rotation.
    failure_threshold: AtLeastOne = 3
    # Good probes in a row until it returns to rotation.
    success_threshold: AtLeastOne = 2
    # `unhealthy` recovers by good probes; `dead` waits for an operator (or the launcher that
    # restarted it).
    on_threshold: Literal["dead", "unhealthy"] = "unhealthy"
    # false: a worker in rotation is not probed, so only failed requests eject it; a worker that is
    # new or out of rotation is probed until it is healthy.
    probe_healthy: bool = True
    # A worker that is not healthy within this time after it was added is reported as failed; 0:
    # never. It is still probed, and gets requests once it is healthy.
    startup_timeout_secs: Duration = 0.0
