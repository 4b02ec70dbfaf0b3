"""The types of the schema's keys: which values each takes, and how they are read.

Values only, as in `config.schema`, which has the keys.
"""

from typing import Annotated, Final, Literal, TypeAlias, get_args

from msgspec import Meta

from omni_proxy.config import fields

# What a worker may be able to do, in the order in which the contract lists it.
Capability = Literal[
    "chat", "speech", "streaming", "image_input", "audio_input", "video_input", "audio_output"
]  # fmt: skip
CAPABILITIES: Final[tuple[Capability, ...]] = get_args(Capability)

# Above 30 years a duration is a slip of the unit; the bound also refuses TOML's inf and nan.
Duration = Annotated[float, Meta(ge=0, le=1_000_000_000)]
Interval = Annotated[float, Meta(gt=0, le=1_000_000_000)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**53)]
Size = Annotated[int, Meta(ge=1, le=2**53, extra={"read": fields.read_size})]
Weight = Annotated[int, Meta(ge=1, le=1_000_000)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Name = Annotated[str, Meta(min_length=1)]
Endpoint = Annotated[str, Meta(extra={"read": fields.read_endpoint})]
WorkerUrl = Annotated[str, Meta(extra={"read": fields.read_worker_url})]
OptionalWorkerUrl = Annotated[str, Meta(extra={"read": fields.read_optional_url})]
Host = Annotated[str, Meta(min_length=1, extra={"read": fields.read_host})]
Address = Annotated[str, Meta(min_length=1, extra={"read": fields.read_address})]
Listen = Annotated[str, Meta(extra={"read": fields.read_listen})]
WebOrigin = Annotated[str, Meta(min_length=1, extra={"read": fields.read_origin})]
OtlpEndpoint = Annotated[str, Meta(extra={"read": fields.read_otlp_endpoint})]
HostName = Annotated[str, Meta(min_length=1, extra={"read": fields.read_host_name})]
HeaderToRead = Annotated[
    str, Meta(min_length=1, max_length=64, extra={"read": fields.read_header_name})
]
HeaderName = Annotated[str, Meta(max_length=64, extra={"read": fields.read_header_name})]
SessionHeader = Annotated[str, Meta(min_length=1, extra={"read": fields.read_session_header})]
BodyKey = Annotated[str, Meta(min_length=1, extra={"read": fields.read_body_key})]
Mode = Annotated[str, Meta(extra={"read": fields.read_mode})]
NetworkUrl = Annotated[str, Meta(extra={"read": fields.read_network_url})]

PolicyName = Annotated[str, Meta(extra={"read": fields.read_policy})]
PoolPolicyName = Annotated[str, Meta(extra={"read": fields.read_optional_policy})]
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
OverloadStatus = Literal[429, 503]
RetryCause = Literal[
    "connect_failure", "reset_before_response", "408", "429", "500", "502", "503", "504"
]
Capabilities: TypeAlias = Annotated[tuple[Capability, ...], Meta(min_length=1)]


# What a worker does of a request: the whole, the prompt alone, or all that follows the prompt.
Role = Literal["regular", "prefill", "decode"]
KvConnector = Literal["sglang", "nixl", "mooncake"]
DEFAULT_BOOTSTRAP_PORT: Final = 8998  # SGLang's and vLLM's default
BootstrapPort = Annotated[int, Meta(ge=0, le=65535)]
Ranks: TypeAlias = Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"]
WorkerRanks: TypeAlias = Annotated[int, Meta(ge=0, le=1024)] | Literal["auto"]  # 0: routing.ranks
Loras: TypeAlias = tuple[Name, ...] | Literal["auto"]
KvEvents = Annotated[str, Meta(extra={"read": fields.read_kv_events})]
KvReplay = Annotated[str, Meta(extra={"read": fields.read_kv_replay})]
