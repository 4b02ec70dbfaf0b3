"""What the command line means for the torch engine: a pipeline and the app's options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from omni_proxy.replica.model_file import MODELS
from omni_proxy.replica.pipeline.builtin import OFF, Choices, builtin_pipeline, capabilities
from omni_proxy.replica.pipeline.config import PipelineConfig
from omni_proxy.replica.pipeline.load import load_pipeline

if TYPE_CHECKING:
    from omni_proxy.replica.api.served import Options

# Makes a model's file present; returns its path, or "" where its stage finds it by itself.
Present = Callable[[str, Path], str]


def pipeline_of(arguments: argparse.Namespace, present: Present) -> PipelineConfig:
    """The pipeline of the file, or the built-in one; raises PipelineConfigError."""
    if arguments.pipeline is not None:
        return load_pipeline(arguments.pipeline)
    model, transcription_path = arguments.model, ""
    if model in MODELS:
        model = present(model, arguments.cache) or model
    if arguments.transcription != OFF:
        transcription_path = present(arguments.transcription, arguments.cache)
    return builtin_pipeline(
        Choices(
            model=model,
            speech=arguments.speech,
            transcription=arguments.transcription,
            transcription_path=transcription_path,
            max_in_flight=arguments.max_in_flight,
            max_running=arguments.max_running,
            threads=arguments.threads,
            own_process=frozenset(arguments.own_process),
        )
    )


def options_of(arguments: argparse.Namespace, pipeline: PipelineConfig) -> Options:
    """What `create_app` shall know; a key that is left out is taken from the environment."""
    builtin = arguments.pipeline is None
    options: Options = {
        "model_name": arguments.model_name or (arguments.model if builtin else pipeline.name),
        "model_path": pipeline.model_path,
        "stream_speech_as": arguments.stream_speech_as,
        # Of a pipeline from a file it is not known: nothing is refused for want of one.
        "capabilities": capabilities(pipeline) if builtin else None,
    }
    if arguments.admin_api_key:
        options["admin_api_key"] = arguments.admin_api_key
    return options
