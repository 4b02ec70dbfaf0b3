"""Settings of a publisher of KV events, the options of `omni-proxy replica` that set them, and how
vLLM and SGLang report where events are published.

Source: note:real-engines 4 (vLLM 0.32: keys, defaults, when it binds; `/kv_event_sources`),
note:features 7 (`kv_events` of `/server_info`).
Invariant: a `KvEventSettings` holds values in range, and endpoints of a known form; invalid values
are refused before a model is loaded, with the option's name. Reported endpoints have the bound port
for port 0, and this replica's address for `*`. Imports neither torch nor ZeroMQ.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from omni_proxy.shared.origins import MAX_PORT

Form: TypeAlias = Literal["vllm", "sglang"]
FORMS: Final[tuple[Form, ...]] = ("vllm", "sglang")
DEFAULT_ENDPOINT: Final = "tcp://*:5557"
DEFAULT_BLOCK_SIZE: Final = 16
MAX_COUNT: Final = 10_000_000
WILDCARD: Final = "*"
_TCP: Final = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.%]+\]|::|[^\s:/\[\]*]+):([0-9]{1,5})")


class KvEventSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how events are published; `endpoint` "" turns publishing off.

    `host` replaces `*` in an endpoint: it is the replica's HTTP address, so that prompts are not
    readable on other addresses. The last `buffer_steps` batches can be replayed at
    `replay_endpoint`; "" turns this off. At most `hwm` batches wait for a slow subscriber, and
    `max_queue_size` for the publisher; further ones are dropped.
    """

    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""
    form: Form = "vllm"
    block_size: int = DEFAULT_BLOCK_SIZE
    host: str = "127.0.0.1"
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            if getattr(self, name):
                _check_endpoint(name, getattr(self, name))
        if self.endpoint and not binds(self.endpoint) and tcp_parts(self.endpoint)[1] == 0:
            raise ValueError(f"endpoint {self.endpoint}: there is no port 0 to connect to")
        if self.replay_endpoint and not self.endpoint:
            raise ValueError("replay_endpoint needs an endpoint")
        for name in ("block_size", "buffer_steps", "hwm", "max_queue_size"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                raise ValueError(f"{name} must be within 1 and {MAX_COUNT}")

    @property
    def enabled(self) -> bool:
        return bool(self.endpoint)


def parse_kv_event_settings(params: Mapping[str, Any]) -> KvEventSettings:
    """Raises ValueError for parameters that are unknown or out of range."""
    try:
        return msgspec.convert(dict(params), KvEventSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_events: {error}") from None


def binds(endpoint: str) -> bool:
    """Whether a publisher listens there, by vLLM's rule; else it connects to a subscriber."""
    return WILDCARD in endpoint or "::" in endpoint or not endpoint.startswith("tcp:")


def tcp_parts(endpoint: str) -> tuple[str, int]:
    """Host and port; the port of an ipc endpoint is -1."""
    match = _TCP.fullmatch(endpoint)
    return (match[1], int(match[2])) if match else ("", -1)


def bind_address(endpoint: str, host: str) -> str:
    """The endpoint with `host` for a wildcard."""
    endpoint_host, port = tcp_parts(endpoint)
    if endpoint_host != WILDCARD:
        return endpoint.replace("tcp://:::", "tcp://[::]:") if endpoint_host == "::" else endpoint
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _check_endpoint(name: str, endpoint: str) -> None:
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    _, port = tcp_parts(endpoint)
    if not 0 <= port <= MAX_PORT:
        raise ValueError(
            f"{name} {endpoint!r} is neither tcp://HOST:PORT, with * for this replica's address, "
            "nor ipc://PATH"
        )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `--kv-events-config`, vLLM's or SGLang's; SGLang's lacks the first key."""

    enable_kv_cache_events: bool | None = None
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = DEFAULT_ENDPOINT
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        if self.enable_kv_cache_events is None:
            return self.publisher == "zmq"
        return self.enable_kv_cache_events and self.publisher != "null"


def add_kv_event_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "KV events",
        "changes of the prefix cache, published over ZeroMQ as by vLLM and SGLang; a router that "
        "reads them sends prompts to replicas that have them cached",
    )
    add = group.add_argument
    add(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish at tcp://*:PORT on --host (0: any free port) or ipc://PATH, or connect to a "
        "subscriber at tcp://HOST:PORT",
    )
    add("--kv-replay", metavar="ENDPOINT", help="where subscribers can request missed batches")
    add(
        "--kv-events-form",
        choices=FORMS,
        help="format of the events (default: vllm; sglang with --dialect sglang)",
    )
    add(
        "--kv-events-config",
        metavar="JSON",
        help="the option of vLLM and SGLang, instead of --kv-events and --kv-replay",
    )
    add(
        "--block-size",
        "--page-size",
        type=int,
        default=DEFAULT_BLOCK_SIZE,
        metavar="TOKENS",
        help="tokens of each block of the events",
    )


def kv_event_params(arguments: argparse.Namespace) -> dict[str, Any]:
    """The publisher, as a parameter of a text stage; nothing without one. Raises ValueError."""
    if arguments.kv_events_config is not None:
        settings = _config_settings(arguments.kv_events_config)
    elif arguments.kv_events:
        settings = {
            "endpoint": arguments.kv_events,
            "replay_endpoint": arguments.kv_replay or "",
        }
    else:
        settings = {}
    if not settings:
        return {}
    own = {
        "form": form_of(arguments),
        "block_size": arguments.block_size,
        "host": arguments.host,
    }
    return {"kv_events": settings | own}


def form_of(arguments: argparse.Namespace) -> Form:
    default: Form = "sglang" if arguments.dialect == "sglang" else "vllm"
    return arguments.kv_events_form or default


def kv_events_problem(arguments: argparse.Namespace) -> str:
    """Why these arguments are invalid for a publisher; "" if they are valid or none is set."""
    plain = arguments.kv_events or arguments.kv_replay
    if arguments.kv_events_config is not None and plain:
        return "--kv-events-config replaces --kv-events and --kv-replay: remove them"
    if arguments.kv_replay and not arguments.kv_events:
        return "--kv-replay needs --kv-events, whose events it replays"
    try:
        params = kv_event_params(arguments)
        if not params:
            return ""
        parse_kv_event_settings(params["kv_events"])
    except ValueError as error:
        return str(error)
    if arguments.engine != "torch":
        return "KV events need --engine torch: llama.cpp publishes none"
    return ""


def _config_settings(text: str) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        config = msgspec.json.decode(text, type=EngineConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"--kv-events-config: {error}") from None
    if not config.publishes:
        return {}
    settings = msgspec.structs.asdict(config)
    del settings["enable_kv_cache_events"], settings["publisher"]
    return settings | {"replay_endpoint": config.replay_endpoint or ""}


INFO_KEY: Final = "kv_events"  # in the information of a stage


def stage_information(
    settings: KvEventSettings, endpoint: str, replay_endpoint: str
) -> dict[str, Any]:
    """The publisher's part of a stage's information, with the endpoints that were opened."""
    opened = {"endpoint": endpoint, "replay_endpoint": replay_endpoint}
    return {INFO_KEY: msgspec.structs.asdict(settings) | opened}


def vllm_sources(stages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The publishers by rank, in vLLM's format; empty if nothing is published."""
    return {
        str(rank): {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": info["endpoint"],
            "replay_endpoint": info["replay_endpoint"] or None,
            "buffer_steps": info["buffer_steps"],
            "hwm": info["hwm"],
            "max_queue_size": info["max_queue_size"],
            "topic": info["topic"],
        }
        for rank, info in enumerate(_publishers(stages))
    }


def sglang_source(stages: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The publisher in SGLang's format; None if there is none that binds a TCP port."""
    for info in _publishers(stages):
        host, port = tcp_parts(info["endpoint"])
        if host and binds(info["endpoint"]):
            return {
                "publisher": "zmq",
                "endpoint_host": host,
                "endpoint_port_base": port,
                "block_size": info["block_size"],
                "dp_size": 1,
                "topic": info["topic"],
                "replay_endpoint": info["replay_endpoint"] or None,
            }
    return None


def _publishers(stages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [stage[INFO_KEY] for stage in stages if INFO_KEY in stage]
