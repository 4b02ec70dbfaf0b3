"""The pipelines that come with the replica.

    text:  prepare ─> decode            omni:  transcribe ─> look ─> prepare ─> decode ~~> speak
Invariant: a request passes only the stages it needs; what a pipeline lacks is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_proxy.replica.pipeline.config import PipelineConfig, StageConfig
from omni_proxy.replica.pipeline.messages import StagePayload

OFF = "off"
SPEECH = "hibari"
TRANSCRIPTION = "whisper-tiny"
IMAGES = "ocr"
PROCESS_STAGES = ("decode", "look", "speak", "transcribe")  # stages that may have one

_PACKAGE = "omni_proxy.replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinOptions:
    """What the command line chooses. `own_process` names stages that get a process each.

    `transcription_path` is the file of a transcription model that is not in the cache folder.
    `max_in_flight` bounds the requests that have not ended (0: no bound), `max_running` those of
    one batch; `threads` is torch's; `tp` is over how many processes the text model is split.
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


def builtin_pipeline(choices: BuiltinOptions) -> PipelineConfig:
    """The text pipeline, and before and after it what was chosen."""
    speaks, hears = choices.speech != OFF, choices.transcription != OFF
    sees = choices.images != OFF
    stages = [
        StageConfig(
            name="prepare",
            factory=f"{_PACKAGE}.stages.prepare:build",
            next=("decode",),
            params={"model": choices.model},
        ),
        _decode(choices, speaks),
    ]
    entries: dict[str, str] = {}
    if sees:
        stages.insert(0, _look(choices))
        entries["chat+image"] = "look"
    if hears:
        stages.insert(0, _transcribe(choices, sees))
        entries |= {"asr": "transcribe", "chat+audio": "transcribe"}
    if speaks:
        stages.append(_speak(choices))
        entries["tts"] = "speak"
    return PipelineConfig(
        name="omni" if speaks or hears or sees else "text",
        model_path=choices.model,
        entry="prepare",
        entries=entries,
        max_in_flight=choices.max_in_flight,
        stages=tuple(stages),
    )


def capabilities(config: PipelineConfig) -> frozenset[str]:
    """What a built-in pipeline can do, in the words that routers use of workers."""
    names = {stage.name for stage in config.stages}
    found = {"chat", "streaming"}
    if "speak" in names:
        found |= {"speech", "audio_output"}
    if "transcribe" in names:
        found.add("audio_input")
    if "look" in names:
        found.add("image_input")
    return frozenset(found)


def _decode(choices: BuiltinOptions, speaks: bool) -> StageConfig:
    following = ("speak",) if speaks else ()
    return StageConfig(
        name="decode",
        factory=f"{_PACKAGE}.text.stage:build",
        next=following,
        stream_to=following,
        route=f"{_PACKAGE}.pipeline.builtin:after_decode" if speaks else "",
        terminal=True,
        process=_process("decode", choices),
        params={
            "model": choices.model,
            "max_running": choices.max_running,
            "threads": choices.threads,
            "tp": choices.tp,
        },
    )


def _transcribe(choices: BuiltinOptions, sees: bool) -> StageConfig:
    return StageConfig(
        name="transcribe",
        factory=f"{_PACKAGE}.stages.transcribe:build",
        next=("look", "prepare") if sees else ("prepare",),
        route=f"{_PACKAGE}.pipeline.builtin:after_transcribe{'_with_images' if sees else ''}",
        terminal=True,
        process=_process("transcribe", choices),
        params={"path": choices.transcription_path, "threads": choices.threads},
    )


def _look(choices: BuiltinOptions) -> StageConfig:
    return StageConfig(
        name="look",
        factory=f"{_PACKAGE}.stages.ocr:build",
        next=("prepare",),
        process=_process("look", choices),
        params={"threads": choices.threads},
    )


def _speak(choices: BuiltinOptions) -> StageConfig:
    return StageConfig(
        name="speak",
        factory=f"{_PACKAGE}.stages.synthesize:build",
        terminal=True,
        process=_process("speak", choices),
        params={"threads": choices.threads},
    )


def _process(stage: str, choices: BuiltinOptions) -> str:
    return stage if stage in choices.own_process else ""


def after_transcribe(payload: StagePayload) -> list[str]:
    """A transcription is an answer of its own, or what a chat goes on with."""
    return [] if payload.request.metadata.get("task") == "asr" else ["prepare"]


def after_transcribe_with_images(payload: StagePayload) -> list[str]:
    """The same where images may have come along."""
    following, inputs = after_transcribe(payload), payload.request.inputs
    seen = following and isinstance(inputs, dict) and inputs.get("images")
    return ["look"] if seen else following


def after_decode(payload: StagePayload) -> list[str]:
    """Speak where audio was asked for."""
    return ["speak"] if "audio" in payload.request.metadata.get("output_modalities", ()) else []
