"""The options of `omni-proxy replica` that publish KV events, and what is made of them.

Invariant: what is refused is refused before a model is loaded, by the option's name. Imports
neither torch nor ZeroMQ.
"""

from __future__ import annotations

import argparse
from typing import Any, Literal

import msgspec

from omni_proxy.replica.kv_events.settings import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_ENDPOINT,
    FORMS,
    Form,
    parse_kv_event_settings,
)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `--kv-events-config`: vLLM's, or SGLang's, which has no first key."""

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
        "what the prefix cache holds, published over ZeroMQ as vLLM and SGLang do it; a router "
        "that reads it sends prompts where they are cached",
    )
    add = group.add_argument
    add(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish at tcp://*:PORT on --host (0: any free port) or ipc://PATH, or connect to a "
        "subscriber at tcp://HOST:PORT",
    )
    add("--kv-replay", metavar="ENDPOINT", help="where missed batches can be asked for again")
    add(
        "--kv-events-form",
        choices=FORMS,
        help="whose form the events have (default: vllm, with --dialect sglang sglang)",
    )
    add(
        "--kv-events-config",
        metavar="JSON",
        help="the same as vLLM and SGLang take it, instead of --kv-events and --kv-replay",
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
    """Why these arguments make no publisher; "" if they do, or if none is wanted."""
    plain = arguments.kv_events or arguments.kv_replay
    if arguments.kv_events_config is not None and plain:
        return "--kv-events-config takes the place of --kv-events and --kv-replay: leave them out"
    if arguments.kv_replay and not arguments.kv_events:
        return "--kv-replay repeats the events of --kv-events: name that, too"
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
