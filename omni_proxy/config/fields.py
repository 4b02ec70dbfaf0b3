"""The types of the schema's keys, and readers for values with a special syntax.

A reader takes the value as parsed from TOML, returns the value that the schema stores, and raises
ValueError with a reason. A type names it in `Meta(extra={"read": …})`; `walk` calls it.

`POLICIES` is the only list of the built-in policies: the parser, `--help`, shell completion and the
tests of the documentation read it. Invariant: an installed package can't replace a built-in policy.
Policy classes are not imported here but in `routing.policies.plugins`.
"""

import re
from fractions import Fraction
from importlib.metadata import entry_points
from ipaddress import AddressValueError, IPv6Address
from typing import Annotated, Final, Literal, TypeAlias, get_args

from msgspec import Meta

from omni_proxy.config.problem import did_you_mean
from omni_proxy.config.url import normalize_url, refused_address
from omni_proxy.shared.origins import MAX_PORT
from omni_proxy.wire.bounded_json import MAX_INTEGER
from omni_proxy.wire.header_fields import FIELD_NAME, NOT_FORWARDED, as_texts
from omni_proxy.wire.load_report import MAX_RANKS

_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
_MODE: Final = re.compile(r"0?[0-7]{3}")
_PLACE: Final = re.compile(r"(\[[^\s\[\]/]+\]|[^\s:\[\]/]+):[0-9]{1,5}")
_TCP_ENDPOINT: Final = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]*]+):([0-9]{1,5})")
_HOST_NAME: Final = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_ORIGIN: Final = re.compile(
    r"(?!https?://[^/]*:(?:80|443)\Z)[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?"
)
_COLLECTOR: Final = re.compile(r"https?://[^\s/?#@]+(?:/[^\s?#]*)?")
MAX_SECS: Final = 1_000_000_000
MAX_WEIGHT: Final = 1_000_000
_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
}
# Header fields that end at the proxy, or that determine framing or access, so the user can't choose
# them for other purposes.
_NOT_FREE = frozenset(
    (*as_texts(NOT_FORWARDED), "content-type", "authorization", "via", "x-forwarded-for")
)


def read_size(value: object) -> object:
    """Bytes of a size such as "64MiB"; the type check handles values that are not strings."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f'"{value}" is not a size; write bytes, or a string such as "64MiB"')
    size = Fraction(match[1]) * unit
    if size.denominator != 1:
        raise ValueError(f'"{value}" is not a whole number of bytes')
    return int(size)


def read_endpoint(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"/[^?#\s\x00-\x20\x7f]*", value):
        raise ValueError(f'"{value}" must be a path: begin with "/", without "?", "#" or space')
    return value


def read_worker_url(value: object) -> object:
    return normalize_url(value, allow_unix=True) if isinstance(value, str) else value


def read_optional_url(value: object) -> object:
    return read_worker_url(value) if value else value


def read_network_url(value: object) -> object:
    """For sources other than FILE: only FILE may name Unix sockets of this machine."""
    return normalize_url(value, allow_unix=False) if isinstance(value, str) else value


def read_kv_events(value: object) -> object:
    """A ZeroMQ endpoint that publishes an engine's KV events, "auto" or "off"."""
    if value in ("auto", "off"):
        return value
    return _tcp_endpoint(value, 'write "tcp://host:port", "auto" or "off"')


def read_kv_replay(value: object) -> object:
    """A ZeroMQ endpoint, or empty."""
    return _tcp_endpoint(value, 'write "tcp://host:port"') if value else value


def _tcp_endpoint(value: object, hint: str) -> object:
    if not isinstance(value, str):
        return value
    match = _TCP_ENDPOINT.fullmatch(value.strip())
    if match is None or not 0 < int(match[2]) <= MAX_PORT:
        raise ValueError(f'"{value}" is not a ZeroMQ endpoint over TCP', hint)
    refused = refused_address(match[1])
    if refused:
        raise ValueError(refused)
    return value.strip()


def read_host(value: object) -> object:
    """An address or a name; `unix:PATH` for a socket of this machine."""
    if isinstance(value, str) and value[:5].lower() == "unix:":
        return normalize_url(value, allow_unix=True)
    return read_address(value)


def read_host_name(value: object) -> object:
    """A name as in a Host field, without the port; returned in lower case without trailing dot."""
    if not isinstance(value, str):
        return value
    name = value.strip().lower().rstrip(".")
    if not _HOST_NAME.fullmatch(name):
        raise ValueError(f'"{value}" is not a host name; write it without scheme, port and path')
    return name


def read_origin(value: object) -> object:
    """An origin as browsers send it: scheme, host, and port if not the scheme's default; or "*"."""
    if not isinstance(value, str) or value == "*":
        return value
    origin = value.strip().lower()
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f'"{value}" is not an origin; write "*" or "https://app.example"')
    return origin


def read_address(value: object) -> object:
    """An address or a name. An IPv6 address may be in brackets, as in URLs; they are removed."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    host, closed, rest = value[1:].partition("]")
    try:
        IPv6Address(host if closed else value)
    except AddressValueError:
        raise ValueError(f'"{value}" has no IPv6 address in its brackets') from None
    if rest:
        raise ValueError(f'"{value}" is more than an address; the port has its own key')
    return host


def read_listen(value: object) -> object:
    """`host:port` (an IPv6 address in brackets) or `unix:PATH`; empty: no listener."""
    if not isinstance(value, str) or not value or value[:5].lower() == "unix:":
        return read_host(value)
    host, port = _PLACE.fullmatch(value.strip()), value.strip().rpartition(":")[2]
    if host is None or int(port) > MAX_PORT:
        raise ValueError(f'"{value}" is neither "host:port" nor "unix:PATH"')
    read_address(host[1])
    return value.strip()


def read_otlp_endpoint(value: object) -> object:
    """The base URL of an OTLP collector, returned without a trailing slash; empty: none."""
    if not isinstance(value, str) or not value:
        return value
    if not _COLLECTOR.fullmatch(value):
        raise ValueError(
            f'"{value}" is not the URL of a collector; write one such as "http://collector:4318"'
        )
    if value.rstrip("/").endswith("/v1/traces"):
        raise ValueError(f'"{value}" has a path that is added automatically', "drop /v1/traces")
    return value.rstrip("/")


def read_mode(value: object) -> object:
    if isinstance(value, str) and not _MODE.fullmatch(value):
        raise ValueError(f'"{value}" is not a file mode; write it in octal, as in "0660"')
    return value


def read_header_name(value: object) -> object:
    """Empty: no header."""
    if not isinstance(value, str) or not value:
        return value
    if not FIELD_NAME.fullmatch(value) or value.lower() in _NOT_FREE:
        raise ValueError(f'"{value}" can\'t be used as this header; use one like "x-request-id"')
    return value


def read_session_header(value: object) -> object:
    """Returned in lower case, because header field names are case-insensitive."""
    if not isinstance(value, str):
        return value
    if not FIELD_NAME.fullmatch(value):
        raise ValueError(f'"{value}" is not a header name; "x-session-id" is one')
    return value.lower()


def read_body_key(value: object) -> object:
    """A key of a JSON body; keys of nested objects are joined by dots, outermost first."""
    if isinstance(value, str) and not all(value.split(".")):
        raise ValueError(f'"{value}" is not a key; write "user", or "session_params.session_id"')
    return value


# Words that are not accepted as a log target: as a path each would create a file of that name.
_NO_LOG_TARGETS: Final = {
    "stdout": 'write "-" for stdout',
    "stderr": 'write "-" for stdout, or "/dev/stderr"',
    **dict.fromkeys(("on", "true", "yes"), 'write "-" for stdout, or a path'),
    **dict.fromkeys(("none", "false", "no"), 'write "off"'),
}


def read_log_target(value: object) -> object:
    """`off`, `-` for stdout, or a path. Raises ValueError(reason, hint)."""
    if isinstance(value, str) and (hint := _NO_LOG_TARGETS.get(value.lower())):
        file = f'a file of that name is "./{value}"'
        raise ValueError(f'"{value}" is neither "off" nor "-" nor a path', f"{hint}; {file}")
    return value


POLICIES: Final = (
    "round_robin", "least_request", "random", "power_of_two", "cache_aware",
    "consistent_hashing", "prefix_hash",
)  # fmt: skip
ENTRY_POINT_GROUP: Final = "omni_proxy.policies"
CLASS_PATH: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")  # package.module:Class


def installed_policies() -> list[str]:
    """The names in the entry point group, sorted, without names of built-in policies."""
    return sorted(entry_points(group=ENTRY_POINT_GROUP).names - set(POLICIES))


def read_policy(value: object) -> object:
    """The name of a known policy, or a syntactically valid class path.

    Raises ValueError(reason, hint).
    """
    if not isinstance(value, str) or value in POLICIES or CLASS_PATH.fullmatch(value):
        return value
    if ":" in value:
        raise ValueError(f'"{value}" is not a class path', 'write it as "package.module:Class"')
    names = sorted([*POLICIES, *installed_policies()])
    if value in names:
        return value
    hint = did_you_mean(value, names) or (
        f'a custom policy is "package.module:Class" or an entry point of {ENTRY_POINT_GROUP}'
    )
    raise ValueError(f'"{value}" is not one of {", ".join(names)}', hint)


def read_optional_policy(value: object) -> object:
    """Like `read_policy`; empty: routing.policy."""
    return read_policy(value) if value else value


# Capabilities of workers, in the order of the contract.
Capability = Literal[
    "chat", "speech", "streaming", "image_input", "audio_input", "video_input", "audio_output"
]  # fmt: skip
CAPABILITIES: Final[tuple[Capability, ...]] = get_args(Capability)

# A duration above 30 years is a mistake of the unit; the bound also refuses TOML's inf and nan.
Duration = Annotated[float, Meta(ge=0, le=MAX_SECS)]
Interval = Annotated[float, Meta(gt=0, le=MAX_SECS)]
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
AtLeastOne = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
Size = Annotated[int, Meta(ge=1, le=MAX_INTEGER, extra={"read": read_size})]
Weight = Annotated[int, Meta(ge=1, le=MAX_WEIGHT)]
Port = Annotated[int, Meta(ge=1, le=MAX_PORT)]
Name = Annotated[str, Meta(min_length=1)]
LogTarget = Annotated[str, Meta(min_length=1, extra={"read": read_log_target})]
Endpoint = Annotated[str, Meta(extra={"read": read_endpoint})]
WorkerUrl = Annotated[str, Meta(extra={"read": read_worker_url})]
OptionalWorkerUrl = Annotated[str, Meta(extra={"read": read_optional_url})]
Host = Annotated[str, Meta(min_length=1, extra={"read": read_host})]
Address = Annotated[str, Meta(min_length=1, extra={"read": read_address})]
Listen = Annotated[str, Meta(extra={"read": read_listen})]
WebOrigin = Annotated[str, Meta(min_length=1, extra={"read": read_origin})]
OtlpEndpoint = Annotated[str, Meta(extra={"read": read_otlp_endpoint})]
HostName = Annotated[str, Meta(min_length=1, extra={"read": read_host_name})]
HeaderToRead = Annotated[str, Meta(min_length=1, max_length=64, extra={"read": read_header_name})]
HeaderName = Annotated[str, Meta(max_length=64, extra={"read": read_header_name})]
SessionHeader = Annotated[str, Meta(min_length=1, extra={"read": read_session_header})]
BodyKey = Annotated[str, Meta(min_length=1, extra={"read": read_body_key})]
Mode = Annotated[str, Meta(extra={"read": read_mode})]
NetworkUrl = Annotated[str, Meta(extra={"read": read_network_url})]

PolicyName = Annotated[str, Meta(extra={"read": read_policy})]
PoolPolicyName = Annotated[str, Meta(extra={"read": read_optional_policy})]
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
OverloadStatus = Literal[429, 503]
RetryCause = Literal[
    "connect_failure", "reset_before_response", "408", "429", "500", "502", "503", "504"
]
Capabilities: TypeAlias = Annotated[tuple[Capability, ...], Meta(min_length=1)]


# The part of a request that a worker computes: all of it, only the prompt, or only the completion.
Role = Literal["regular", "prefill", "decode"]
PortOrZero = Annotated[int, Meta(ge=0, le=MAX_PORT)]
Ranks: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_RANKS)] | Literal["auto"]
# 0: the value of routing.ranks.
WorkerRanks: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RANKS)] | Literal["auto"]
Loras: TypeAlias = tuple[Name, ...] | Literal["auto"]
KvEvents = Annotated[str, Meta(extra={"read": read_kv_events})]
KvReplay = Annotated[str, Meta(extra={"read": read_kv_replay})]
