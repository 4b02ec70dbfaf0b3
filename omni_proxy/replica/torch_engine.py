"""Converts command-line arguments to a pipeline and the app's options, for the torch engine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_proxy.replica.api.route_context import ADMIN_KEY_VARIABLE
from omni_proxy.replica.kv_events.publisher_settings import kv_event_params
from omni_proxy.replica.kv_transfer.request_fields import TransferFields
from omni_proxy.replica.kv_transfer.transfer_settings import connector_of, transfer_params
from omni_proxy.replica.model_file import MODELS
from omni_proxy.replica.pipeline.builtin import OFF, BuiltinOptions, builtin_pipeline, capabilities
from omni_proxy.replica.pipeline.config import PipelineConfig, current_name, load_pipeline
from omni_proxy.shared.origins import is_loopback

if TYPE_CHECKING:
    from omni_proxy.replica.api.route_context import AppOptions

TEXT_FACTORY = "omni_proxy.replica.stages.text:build"
PROMPT_FACTORY = "omni_proxy.replica.stages.prepare:build"

# Fetches a model's file if needed; returns its path, or "" if the stage finds it without one.
EnsureModelFile = Callable[[str, Path], str]


def build_pipeline(arguments: argparse.Namespace, ensure_file: EnsureModelFile) -> PipelineConfig:
    """The pipeline of the file, or the built-in one; raises PipelineConfigError."""
    weights = weights_params(arguments) | transfer_params(arguments) | kv_event_params(arguments)
    if arguments.pipeline is not None:
        return with_weight_params(load_pipeline(arguments.pipeline), weights)
    model, transcription_path = arguments.model, ""
    if model in MODELS:
        model = ensure_file(model, arguments.cache) or model
    if arguments.transcription != OFF:
        transcription_path = ensure_file(arguments.transcription, arguments.cache)
    pipeline = builtin_pipeline(
        BuiltinOptions(
            model=model,
            speech=arguments.speech,
            transcription=arguments.transcription,
            transcription_path=transcription_path,
            images=arguments.images,
            max_in_flight=arguments.max_in_flight,
            max_running=arguments.max_running,
            threads=arguments.threads,
            tp=arguments.tp,
            own_process=frozenset(arguments.own_process),
        )
    )
    return with_weight_params(pipeline, weights)


def with_weight_params(pipeline: PipelineConfig, weights: Mapping[str, Any]) -> PipelineConfig:
    """Add these parameters to every text stage that does not set them itself."""
    stages = (
        replace(stage, params={**weights, **stage.params})
        if current_name(stage.factory) == TEXT_FACTORY
        else stage
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=tuple(stages))


def weights_params(arguments: argparse.Namespace) -> dict[str, Any]:
    """Command-line settings of weight updates, as parameters of a text stage."""
    return {"weights_root": weights_root_of(arguments)} | {
        name: getattr(arguments, name)
        for name in (
            "weights_isolation",
            "weights_join_secs",
            "weights_ready_secs",
            "weights_receive_secs",
            "weights_stall_secs",
        )
    }


def weights_root_of(arguments: argparse.Namespace) -> str:
    """The folder below which weights are read; "" for none.

    By default it is "/", which lets clients name any file; with other hosts as clients, this needs
    an admin key.
    """
    if arguments.weights_root is not None:
        return str(arguments.weights_root.absolute())
    guarded = arguments.admin_api_key or os.environ.get(ADMIN_KEY_VARIABLE)
    return "/" if guarded or is_loopback(arguments.host) else ""


def build_app_options(arguments: argparse.Namespace, pipeline: PipelineConfig) -> AppOptions:
    """Options of `create_app`; a missing admin key is read from the environment."""
    builtin = arguments.pipeline is None
    options: AppOptions = {
        "model_name": arguments.model_name or (arguments.model if builtin else pipeline.name),
        "model_path": pipeline.model_path,
        "stream_speech_as": arguments.stream_speech_as,
        "enable_tensor_updates": arguments.enable_tensor_updates,
        # Unknown for a pipeline from a file: no request is refused for a missing capability then.
        "capabilities": capabilities(pipeline) if builtin else None,
        "dialect": arguments.dialect,
        "tokenizer_model": tokenizer_model(pipeline),
        "stored_responses": arguments.stored_responses,
        "transfer": TransferFields(
            arguments.role, connector_of(arguments), arguments.bootstrap_port
        ),
    }
    if arguments.profile_root is not None:
        options["profile_root"] = arguments.profile_root.absolute()
    if arguments.admin_api_key:
        options["admin_api_key"] = arguments.admin_api_key
    return options


def tokenizer_model(pipeline: PipelineConfig) -> str:
    """The model whose tokenizer encodes prompts; "" for a pipeline without one."""
    factories = (PROMPT_FACTORY, TEXT_FACTORY)
    models = (
        str(stage.params["model"])
        for stage in pipeline.stages
        if current_name(stage.factory) in factories and "model" in stage.params
    )
    return next(models, "")
