"""Command lines of the known engines: one replica each, on {host} and {port}.

PURE: nothing is looked up or started; a missing program shows when it is launched.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from omni_proxy.config.fields import CAPABILITIES, Capability

ROLE_ENGINES: Final = ("replica", "sglang")  # which can be started with a role
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
    """The command line's settings of one replica; `flags` are for the engine alone."""

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
