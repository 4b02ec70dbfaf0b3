"""The commands that start the engines we know: one replica each, on {host} and {port}.

Nothing is looked up or started here; whether the program is there shows when it is launched.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from omni_proxy.config.schema import CAPABILITIES, Capability

OWN_MODELS: Final = ("tiny", "smollm2-135m")
_PLACE: Final = ("--host", "{host}", "--port", "{port}")


_GIVES: Final = {
    ("--speech", "hibari"): frozenset({"speech", "audio_output"}),
    ("--transcription", "whisper-tiny"): frozenset({"audio_input"}),
    ("--images", "ocr"): frozenset({"image_input"}),
}


class EngineCommandError(Exception):
    """The replicas can't be started like that; the text says what to do instead."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the command line says of one replica; `flags` are for the engine alone."""

    model_path: str
    tensor_parallel_size: int
    served_model_name: str
    flags: tuple[str, ...]


def engine_for(model_path: str) -> str:
    """What serves a model where nobody said: ours if it can, else what the model was made for."""
    own = model_path in OWN_MODELS or model_path.endswith(".gguf")
    return "replica" if own else "sglang"


def engine_capabilities(engine: str, asked: EngineRequest) -> tuple[Capability, ...]:
    """What the replicas can do, as far as their flags tell; of other engines nothing is known."""
    if engine != "replica" and asked.model_path not in OWN_MODELS:
        return CAPABILITIES
    found: set[str] = {"chat", "streaming"}
    for flag, value in pairwise((*asked.flags, "")):
        found |= _GIVES.get((flag, value), frozenset())
    return tuple(name for name in CAPABILITIES if name in found)


def engine_command(engine: str, asked: EngineRequest) -> tuple[str, ...]:
    """The words of one replica's command. Raises EngineCommandError."""
    command = ENGINES[engine](asked)
    return (*command, *_PLACE, *asked.flags)


def model_name(engine: str, asked: EngineRequest) -> str:
    """What the replicas serve; "" where the engine alone decides it."""
    if asked.served_model_name:
        return asked.served_model_name
    own = engine == "replica" or asked.model_path in OWN_MODELS
    return os.path.basename(asked.model_path) if own else ""


def _replica(asked: EngineRequest) -> tuple[str, ...]:
    return (
        *("omni-proxy", "replica", "--model", asked.model_path),
        *_ranks("--tp", asked),
        *_named("--model-name", asked),
    )


def _llamacpp(asked: EngineRequest) -> tuple[str, ...]:
    if asked.tensor_parallel_size > 1:
        raise EngineCommandError(
            "--tp-size: llama.cpp has one rank; leave --tp-size or --engine out"
        )
    if asked.model_path in OWN_MODELS:
        return (*_replica(asked), "--engine", "llamacpp")
    return ("llama-server", "--model", asked.model_path, *_named("--alias", asked))


def _sglang(asked: EngineRequest) -> tuple[str, ...]:
    return (
        *("python3", "-m", "sglang.launch_server", "--model-path", _foreign(asked)),
        *_ranks("--tp-size", asked),
        *_named("--served-model-name", asked),
    )


def _vllm(asked: EngineRequest) -> tuple[str, ...]:
    return (
        *("vllm", "serve", _foreign(asked)),
        *_ranks("--tensor-parallel-size", asked),
        *_named("--served-model-name", asked),
    )


def _omni(asked: EngineRequest) -> tuple[str, ...]:
    if asked.tensor_parallel_size > 1:
        raise EngineCommandError("--tp-size: say it as sgl-omni does, --STAGE.engine.tp_size N")
    return (
        *("sgl-omni", "serve", "--model-path", _foreign(asked)),
        *_named("--model-name", asked),
    )


def _foreign(asked: EngineRequest) -> str:
    if asked.model_path in OWN_MODELS:
        raise EngineCommandError(
            f"--model-path {asked.model_path} is a model of our own replica: name one that this "
            "engine can load, or leave --engine out"
        )
    return asked.model_path


def _ranks(flag: str, asked: EngineRequest) -> tuple[str, ...]:
    size = asked.tensor_parallel_size
    return (flag, str(size)) if size > 1 else ()


def _named(flag: str, asked: EngineRequest) -> tuple[str, ...]:
    return (flag, asked.served_model_name) if asked.served_model_name else ()


ENGINES: Final[Mapping[str, Callable[[EngineRequest], tuple[str, ...]]]] = {
    "replica": _replica,
    "sglang": _sglang,
    "vllm": _vllm,
    "llamacpp": _llamacpp,
    "omni": _omni,
}
