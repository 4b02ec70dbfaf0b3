"""The built-in pipelines.

    text:  prepare ─> decode            omni:  transcribe ─> look ─> prepare ─> decode ~~> speak
Invariant: a request passes only the stages that it needs; a disabled stage is not in the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_proxy.replica.pipeline.config import PipelineConfig, StageConfig
from omni_proxy.replica.pipeline.stage_messages import StagePayload

OFF = "off"

_PACKAGE = "omni_proxy.replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinOptions:
    """Options from the command line. `own_process` names stages that get their own process.

    `transcription_path` is the file of a transcription model outside the cache folder.
    `max_in_flight` bounds live requests (0: no bound), `max_running` requests of a batch; `threads`
    is torch's number of threads; `tp` is the number of processes that share the text model.
    """

    model: str = "tiny"
    speech: str = OFF
    transcription: str = OFF
    images: str = OFF
    transcription_path: str = ""
    max_in_flight: int = 0
    max_running: int = 16
    threads: int = 1
    tp: int = 1
    own_process: frozenset[str] = frozenset()


def builtin_pipeline(options: BuiltinOptions) -> PipelineConfig:
    """Return the text pipeline, with the chosen stages before and after it."""
    has_speech, has_transcription = options.speech != OFF, options.transcription != OFF
    has_images = options.images != OFF
    stages = [
        StageConfig(
            name="prepare",
            factory=f"{_PACKAGE}.stages.prepare:build",
            next=("decode",),
            params={"model": options.model},
        ),
        _decode(options, has_speech),
    ]
    entries: dict[str, str] = {}
    if has_images:
        stages.insert(0, _ocr(options))
        entries["chat+image"] = "look"
    if has_transcription:
        stages.insert(0, _transcribe(options, has_images))
        entries |= {"asr": "transcribe", "chat+audio": "transcribe"}
    if has_speech:
        stages.append(_synthesize(options))
        entries["tts"] = "speak"
    return PipelineConfig(
        name="omni" if has_speech or has_transcription or has_images else "text",
        model_path=options.model,
        entry="prepare",
        entries=entries,
        max_in_flight=options.max_in_flight,
        stages=tuple(stages),
    )


def capabilities(config: PipelineConfig) -> frozenset[str]:
    """The capabilities of a built-in pipeline, under the names that routers use."""
    names = {stage.name for stage in config.stages}
    capability_names = {"chat", "streaming"}
    if "speak" in names:
        capability_names |= {"speech", "audio_output"}
    if "transcribe" in names:
        capability_names.add("audio_input")
    if "look" in names:
        capability_names.add("image_input")
    return frozenset(capability_names)


def _decode(options: BuiltinOptions, has_speech: bool) -> StageConfig:
    following = ("speak",) if has_speech else ()
    return StageConfig(
        name="decode",
        factory=f"{_PACKAGE}.stages.text:build",
        next=following,
        stream_to=following,
        route=f"{_PACKAGE}.pipeline.builtin:after_decode" if has_speech else "",
        terminal=True,
        process=_process("decode", options),
        params={
            "model": options.model,
            "max_running": options.max_running,
            "threads": options.threads,
            "tp": options.tp,
        },
    )


def _transcribe(options: BuiltinOptions, has_images: bool) -> StageConfig:
    return StageConfig(
        name="transcribe",
        factory=f"{_PACKAGE}.stages.transcribe:build",
        next=("look", "prepare") if has_images else ("prepare",),
        route=f"{_PACKAGE}.pipeline.builtin:after_transcribe{'_with_images' if has_images else ''}",
        terminal=True,
        process=_process("transcribe", options),
        params={"path": options.transcription_path, "threads": options.threads},
    )


def _ocr(options: BuiltinOptions) -> StageConfig:
    return StageConfig(
        name="look",
        factory=f"{_PACKAGE}.stages.ocr:build",
        next=("prepare",),
        process=_process("look", options),
        params={"threads": options.threads},
    )


def _synthesize(options: BuiltinOptions) -> StageConfig:
    return StageConfig(
        name="speak",
        factory=f"{_PACKAGE}.stages.synthesize:build",
        terminal=True,
        process=_process("speak", options),
        params={"threads": options.threads},
    )


def _process(stage: str, options: BuiltinOptions) -> str:
    return stage if stage in options.own_process else ""


def after_transcribe(payload: StagePayload) -> list[str]:
    """The route of "transcribe": nothing after a transcription, else the chat stages."""
    return [] if payload.request.metadata.get("task") == "asr" else ["prepare"]


def after_transcribe_with_images(payload: StagePayload) -> list[str]:
    """The route of "transcribe" in pipelines with an image stage."""
    following, inputs = after_transcribe(payload), payload.request.inputs
    has_images = following and isinstance(inputs, dict) and inputs.get("images")
    return ["look"] if has_images else following


def after_decode(payload: StagePayload) -> list[str]:
    """The route of "decode": to "speak" if audio was requested."""
    return ["speak"] if "audio" in payload.request.metadata.get("output_modalities", ()) else []
