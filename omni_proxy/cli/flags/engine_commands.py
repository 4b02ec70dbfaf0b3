"""Command lines of the known engines: one replica each, on {host} and {port}.

Each replica needs its own ports for KV events: replica i gets the given port + i, as vLLM's ranks
do, through the placeholder `{PORT+index}`. Port 0 is any free one, and an endpoint that connects
may be the same for all. Pure: it looks up and starts nothing; a missing program fails at launch.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from omni_proxy.config.fields import CAPABILITIES, Capability

KV_EVENTS: Final = "--kv-events"
KV_REPLAY: Final = "--kv-replay"
KV_EVENTS_CONFIG: Final = "--kv-events-config"
KV_EVENT_FLAGS: Final = (KV_EVENTS, KV_REPLAY, KV_EVENTS_CONFIG)
_PORT: Final = re.compile(r"(tcp://.*:)([0-9]+)")


class PortsOverlapError(ValueError):
    """Two replicas would get the same port; the text gives the remedy."""


def publishes(flags: Sequence[str]) -> bool:
    """Whether replicas with these flags publish KV events."""
    return any(flag.partition("=")[0] in (KV_EVENTS, KV_EVENTS_CONFIG) for flag in flags)


def ports_apart(flags: Sequence[str], first: int, count: int) -> tuple[str, ...]:
    """The flags of `count` replicas with separate ports; `first` is the index of the first replica.

    Raises PortsOverlapError.
    """
    ports: list[int] = []
    changed: list[str] = []
    name = ""
    for word in flags:
        flag, equals, value = word.partition("=")
        if equals and flag in KV_EVENT_FLAGS:
            changed.append(f"{flag}={_value(flag, value, first, ports)}")
        elif name in KV_EVENT_FLAGS:
            changed.append(_value(name, word, first, ports))
        else:
            changed.append(word)
        name = word if name not in KV_EVENT_FLAGS else ""
    for one, other in zip(sorted(ports), sorted(ports)[1:], strict=False):
        if other - one < first + count:
            raise PortsOverlapError(
                f"KV events: ports {one} and {other} are too close for {first + count} replicas, "
                "which use consecutive ports: pass others, or port 0 for any free one"
            )
    return tuple(changed)


def _value(flag: str, value: str, first: int, ports: list[int]) -> str:
    if flag != KV_EVENTS_CONFIG:
        return _endpoint(value, first, ports, always_binds=flag == KV_REPLAY)
    try:
        config = json.loads(value)
    except ValueError:
        return value  # the engine reports what is wrong with it
    if not isinstance(config, dict):
        return value
    for key, endpoint in _endpoints(config):
        always = key == "replay_endpoint"
        config[key] = _endpoint(endpoint, first, ports, always_binds=always)
    return json.dumps(config)


def _endpoints(config: dict[str, object]) -> Iterator[tuple[str, str]]:
    # vLLM and SGLang publish there by default.
    config.setdefault("endpoint", "tcp://*:5557")
    for key in ("endpoint", "replay_endpoint"):
        value = config.get(key)
        if isinstance(value, str):
            yield key, value


def _endpoint(text: str, first: int, ports: list[int], *, always_binds: bool) -> str:
    match = _PORT.fullmatch(text)
    if match is None or not (always_binds or "*" in text or "::" in text) or not int(match[2]):
        return text
    ports.append(int(match[2]))
    return f"{match[1]}{{{int(match[2]) + first}+index}}"


ROLE_ENGINES: Final = ("replica", "sglang")  # engines that can be started with a role
OWN_MODELS: Final = ("tiny", "smollm2-135m")
_PLACE: Final = ("--host", "{host}", "--port", "{port}")


_GIVES: Final = {
    ("--speech", "hibari"): frozenset({"speech", "audio_output"}),
    ("--transcription", "whisper-tiny"): frozenset({"audio_input"}),
    ("--images", "ocr"): frozenset({"image_input"}),
}


class EngineCommandError(Exception):
    """The replicas can't be started with these flags; the text gives the remedy."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The command line's settings of one replica; `flags` go to the engine unchanged."""

    model_path: str
    tensor_parallel_size: int
    served_model_name: str
    flags: tuple[str, ...]
    role: Literal["", "prefill", "decode"] = ""
    kv_connector: str = ""  # of a role; "" is sglang


def engine_for(model_path: str) -> str:
    """The default engine for a model: the built-in replica if it can load it, else sglang."""
    builtin = model_path in OWN_MODELS or model_path.endswith(".gguf")
    return "replica" if builtin else "sglang"


def engine_capabilities(engine: str, request: EngineRequest) -> tuple[Capability, ...]:
    """The capabilities that the replicas' flags imply; all of them for other engines."""
    if engine != "replica" and request.model_path not in OWN_MODELS:
        return CAPABILITIES
    capabilities: set[str] = {"chat", "streaming"}
    for flag, value in pairwise((*request.flags, "")):
        capabilities |= _GIVES.get((flag, value), frozenset())
    return tuple(name for name in CAPABILITIES if name in capabilities)


def engine_command(engine: str, request: EngineRequest) -> tuple[str, ...]:
    """The command of one replica. Raises EngineCommandError."""
    if request.role and engine not in ROLE_ENGINES:
        raise EngineCommandError(
            f"--prefill and --decode start {' and '.join(ROLE_ENGINES)} engines; write [[launch]] "
            f"groups with a role for {engine}"
        )
    if engine == "sglang" and request.kv_connector not in ("", "sglang"):
        raise EngineCommandError(
            f"--kv-connector {request.kv_connector}: SGLang's engines have none; leave it out"
        )
    if request.role and request.tensor_parallel_size > 1 and engine == "replica":
        raise EngineCommandError("--tp-size: a KV cache is handed over by one rank; leave it out")
    command = ENGINES[engine](request)
    return (*command, *_PLACE, *request.flags)


def model_name(engine: str, request: EngineRequest) -> str:
    """The name of the served model; "" if the engine decides it."""
    if request.served_model_name:
        return request.served_model_name
    builtin = engine == "replica" or request.model_path in OWN_MODELS
    return os.path.basename(request.model_path) if builtin else ""


def _replica(request: EngineRequest) -> tuple[str, ...]:
    return (
        *("omni-proxy", "replica", "--model", request.model_path),
        *_ranks("--tp", request),
        *_named("--model-name", request),
        *_role("--role", "--bootstrap-port", request),
        *(("--kv-connector", request.kv_connector) if request.kv_connector else ()),
    )


def _llamacpp(request: EngineRequest) -> tuple[str, ...]:
    if request.tensor_parallel_size > 1:
        raise EngineCommandError(
            "--tp-size: llama.cpp has one rank; leave --tp-size or --engine out"
        )
    if request.model_path in OWN_MODELS:
        return (*_replica(request), "--engine", "llamacpp")
    return ("llama-server", "--model", request.model_path, *_named("--alias", request))


def _sglang(request: EngineRequest) -> tuple[str, ...]:
    return (
        *("python3", "-m", "sglang.launch_server", "--model-path", _model_path(request)),
        *_ranks("--tp-size", request),
        *_named("--served-model-name", request),
        *_role("--disaggregation-mode", "--disaggregation-bootstrap-port", request),
    )


def _vllm(request: EngineRequest) -> tuple[str, ...]:
    return (
        *("vllm", "serve", _model_path(request)),
        *_ranks("--tensor-parallel-size", request),
        *_named("--served-model-name", request),
    )


def _omni(request: EngineRequest) -> tuple[str, ...]:
    if request.tensor_parallel_size > 1:
        raise EngineCommandError("--tp-size: use sgl-omni's flag, --STAGE.engine.tp_size N")
    return (
        *("sgl-omni", "serve", "--model-path", _model_path(request)),
        *_named("--model-name", request),
    )


def _model_path(request: EngineRequest) -> str:
    if request.model_path in OWN_MODELS:
        raise EngineCommandError(
            f"--model-path {request.model_path} is a model of the built-in replica: name one that "
            "this engine can load, or leave --engine out"
        )
    return request.model_path


def _ranks(flag: str, request: EngineRequest) -> tuple[str, ...]:
    size = request.tensor_parallel_size
    return (flag, str(size)) if size > 1 else ()


def _role(flag: str, port_flag: str, request: EngineRequest) -> tuple[str, ...]:
    """The flags of a prefill or decode replica."""
    if not request.role:
        return ()
    port = (port_flag, "{bootstrap_port}") if request.role == "prefill" else ()
    return (flag, request.role, *port)


def _named(flag: str, request: EngineRequest) -> tuple[str, ...]:
    return (flag, request.served_model_name) if request.served_model_name else ()


ENGINES: Final[Mapping[str, Callable[[EngineRequest], tuple[str, ...]]]] = {
    "replica": _replica,
    "sglang": _sglang,
    "vllm": _vllm,
    "llamacpp": _llamacpp,
    "omni": _omni,
}
