"""`[[workers]]`, named in FILE, `[[launch]]`: replicas that the proxy starts, and `[health]`:
probes of both. Values only.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from omni_proxy.config.fields import (
    CAPABILITIES,
    Address,
    AtLeastOne,
    Capabilities,
    Count,
    Duration,
    Endpoint,
    Interval,
    KvEvents,
    KvReplay,
    Loras,
    Name,
    Port,
    PortOrZero,
    Weight,
    WorkerRanks,
    WorkerUrl,
)
from omni_proxy.config.url import normalize_url
from omni_proxy.shared.engine_protocol import DEFAULT_BOOTSTRAP_PORT


class WorkerEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Base URL, normalized by `parse`; or unix:PATH.
    url: WorkerUrl
    # Empty: routing.model, and if that is empty too, any model.
    model: str = ""
    capabilities: Capabilities = CAPABILITIES
    # true: no new requests; still probed.
    disabled: bool = False
    # Share of requests relative to the other workers.
    weight: Weight = 1
    # Most requests in flight on this worker; 0: no limit.
    max_inflight: Count = 0
    # Environment variable with the bearer key for this worker. A name, so that FILE holds no key.
    api_key_env: str = ""
    # Empty: as its /server_info reports, regular if it reports none.
    role: Literal["", "regular", "prefill", "decode"] = ""
    # Protocol of KV transfer between prefill and decode workers, the same for both workers of a
    # pair. Empty: sglang.
    kv_connector: Literal["", "sglang", "nixl", "mooncake"] = ""
    # Bootstrap port of a prefill worker (sglang, mooncake); 0: as its /server_info reports.
    bootstrap_port: PortOrZero = DEFAULT_BOOTSTRAP_PORT
    # Data-parallel ranks behind this URL; above 1 each is picked and counted separately; 0:
    # routing.ranks; "auto": as the engine reports.
    ranks: WorkerRanks = 0
    # Adapters that requests may name as their model; "auto": those of its /v1/models.
    loras: Loras = ()
    # Endpoint where its engine publishes KV events: "tcp://host:port" (data-parallel rank r: port +
    # r; with the host * the engine connects to the proxy); "auto": as the engine reports.
    kv_events: KvEvents = "off"
    # Endpoint that replays missed batches of KV events, "tcp://host:port"; empty: none.
    kv_replay: KvReplay = ""
    # For https: PEM file of CAs for its certificate; empty: server.tls_worker_ca.
    tls_ca: str = ""
    # false: its certificate is not verified: any host at its address can get its requests and key.
    tls_verify: bool = True


class LaunchEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of replicas that the proxy starts, watches, restarts and stops."""

    name: Name = "local"
    # {host} and {port} are substituted for each replica; {5557+index} is 5557 for the first
    # replica, 5558 for the second.
    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    replicas: Annotated[int, Meta(ge=0, le=1024)] = 1
    host: Address = "127.0.0.1"
    # Replica i listens on base_port + i.
    base_port: Port = 31000
    # Above 0 each replica gets its own slice of the GPUs in CUDA_VISIBLE_DEVICES.
    gpus_per_replica: Count = 0
    # If a replica is not ready after this, its start has failed. Loading weights takes minutes.
    ready_timeout_secs: Duration = 300.0
    restart: Literal["on_failure", "never"] = "on_failure"
    capabilities: Capabilities = CAPABILITIES
    # Empty: as for a worker.
    model: str = ""
    # Role of the replicas, as for a worker. Replica i has bootstrap port base_bootstrap_port + i,
    # substituted for {bootstrap_port} in the command and in env.
    role: Literal["", "regular", "prefill", "decode"] = ""
    kv_connector: Literal["", "sglang", "nixl", "mooncake"] = ""
    base_bootstrap_port: Port = DEFAULT_BOOTSTRAP_PORT
    # "auto": follow KV events if the engine reports that it publishes them; as for a worker.
    kv_events: Literal["off", "auto"] = "off"
    # Added to the environment of each replica.
    env: dict[str, str] = {}

    @property
    def urls(self) -> tuple[str, ...]:
        """One worker URL per replica, in order, normalized."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return tuple(
            normalize_url(f"http://{host}:{self.base_port + i}", allow_unix=False)
            for i in range(self.replicas)
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
