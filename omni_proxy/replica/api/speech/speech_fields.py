"""The fields of a speech request, validated one by one.

Invariant: a value of the wrong type is refused, never converted; null is the same as absent;
unknown fields are ignored. Source: note:api-server 1.4. No audio is read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from omni_proxy.replica.api.common.errors import SpeechError
from omni_proxy.replica.pipeline.client import GenerateRequest, SamplingParams

MAX_INPUT_CHARS: Final = 4096
MEDIA_TYPES: Final = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "pcm": "audio/pcm",
    "aac": "audio/aac",
    "opus": "audio/opus",
}
STREAM_FORMATS: Final = ("audio", "sse")
TASK_TYPES: Final = {"base": "Base", "customvoice": "CustomVoice", "voicedesign": "VoiceDesign"}
LANGUAGES: Final = (
    "Auto",
    "Chinese",
    "English",
    "Japanese",
    "Korean",
    "German",
    "French",
    "Russian",
    "Portuguese",
    "Spanish",
    "Italian",
)
_SOURCES: Final = ("audio_path", "ref_audio", "audio", "data")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True, slots=True)
class _FieldType:
    """The type of a field: a description for error messages, and a check."""

    description: str
    accepts: Callable[[Any], bool]


_TEXT = _FieldType("a string", lambda value: isinstance(value, str))
_FLAG = _FieldType("true or false", lambda value: isinstance(value, bool))
_NUMBER = _FieldType("a number", _is_number)
_INT = _FieldType("an integer", _is_int)
_COUNT = _FieldType("an integer above 0", lambda value: _is_int(value) and value > 0)
_INDEX = _FieldType("an integer of 0 or more", lambda value: _is_int(value) and value >= 0)
_OBJECT = _FieldType("an object", lambda value: isinstance(value, dict))
_OBJECTS = _FieldType(
    "a list of objects",
    lambda value: (
        isinstance(value, list) and all(isinstance(reference, dict) for reference in value)
    ),
)

FIELD_TYPES: Final[Mapping[str, _FieldType]] = {
    "input": _TEXT,
    "model": _TEXT,
    "voice": _TEXT,
    "speaker": _TEXT,
    "response_format": _TEXT,
    "stream_format": _TEXT,
    "task_type": _TEXT,
    "language": _TEXT,
    "instructions": _TEXT,
    "ref_audio": _TEXT,
    "ref_text": _TEXT,
    "references": _OBJECTS,
    "speed": _NUMBER,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "top_k": _INT,
    "seed": _INDEX,
    "initial_codec_chunk_frames": _INDEX,
    "token_count": _COUNT,
    "duration_tokens": _COUNT,
    "max_new_tokens": _COUNT,
    "stream": _FLAG,
    "x_vector_only_mode": _FLAG,
    "stream_codec_output": _FLAG,
    "suppress_bootstrap_silence": _FLAG,
    "stage_params": _OBJECT,
}
_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "seed",
    "max_new_tokens",
)
_OPTIONS: Final = (
    "task_type",
    "language",
    "instructions",
    "ref_text",
    "x_vector_only_mode",
    "stream_codec_output",
    "suppress_bootstrap_silence",
    "token_count",
    "duration_tokens",
    "seed",
)


@dataclass(frozen=True, slots=True)
class VoiceReference:
    """A voice sample: where to read its audio (or its codes), and its transcript."""

    path: str
    source: str | None
    text: str | None = None
    media_type: str | None = None
    vq_codes: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    """A validated request; `format_given` means that response_format was set explicitly."""

    input: str = ""
    model: str | None = None
    voice: str = "default"
    response_format: str = "wav"
    format_given: bool = False
    speed: float = 1.0
    stream: bool = False
    stream_format: str | None = None
    references: tuple[VoiceReference, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    extra_params: Mapping[str, Any] = field(default_factory=dict)
    stage_params: Mapping[str, Any] = field(default_factory=dict)

    def generate_request(
        self, *, stream: bool, references: list[dict[str, Any]] | None = None
    ) -> GenerateRequest:
        """Return the pipeline request: task "tts", the other fields under `tts_params`.

        `references` have their audio already read. Source: note:api-server 1.4, lowering.
        """
        tts_params: dict[str, Any] = {"voice": self.voice, "response_format": self.response_format}
        tts_params |= {"speed": self.speed, **self.options}
        prompt = {"text": self.input, "references": references} if references else self.input
        return GenerateRequest(
            prompt=prompt,
            model=self.model,
            sampling=self.sampling,
            stream=stream,
            output_modalities=("audio",),
            task="tts",
            metadata={"tts_params": tts_params},
            stage_params=self.stage_params,
            extra_params=self.extra_params,
        )


def parse_object(body: bytes, what: str = "speech request body") -> dict[str, Any]:
    """Return the JSON object in `body`. Raises SpeechError."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise SpeechError(f"{what} must be valid JSON") from None
    except RecursionError:
        raise SpeechError(f"{what} is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise SpeechError(f"{what} must be a JSON object")
    return parsed


def parse_speech_request(body: Mapping[str, Any], *, default_format: str = "wav") -> SpeechRequest:
    """Validate all fields; `check_input` checks that `input` is present. Raises SpeechError."""
    fields = {name: body[name] for name in FIELD_TYPES if body.get(name) is not None}
    for name, value in fields.items():
        if not FIELD_TYPES[name].accepts(value):
            raise SpeechError(f"{name} must be {FIELD_TYPES[name].description}", name)
    _normalize(fields)
    return SpeechRequest(
        input=fields.get("input", ""),
        model=fields.get("model"),
        voice=_voice_of(fields),
        response_format=fields.get("response_format", default_format),
        format_given="response_format" in fields,
        speed=_speed_of(fields),
        stream=fields.get("stream", False),
        stream_format=fields.get("stream_format"),
        references=_references_of(fields),
        options={name: fields[name] for name in _OPTIONS if name in fields},
        sampling=SamplingParams(**{name: fields[name] for name in _SAMPLING if name in fields}),
        extra_params={
            name: fields[name] for name in ("initial_codec_chunk_frames",) if name in fields
        },
        stage_params=fields.get("stage_params", {}),
    )


def check_input(request: SpeechRequest, max_chars: int = MAX_INPUT_CHARS) -> None:
    """Refuse a request without text, or with too much text."""
    if not request.input.strip():
        raise SpeechError("input must be a non-empty string", "input")
    if len(request.input) > max_chars:
        raise SpeechError(
            f"input has {len(request.input)} characters; at most {max_chars} are allowed",
            "input",
        )


def _normalize(fields: dict[str, Any]) -> None:
    """Normalize fields whose values may be written in several ways."""
    if "response_format" in fields:
        fields["response_format"] = _one_of(fields, "response_format", MEDIA_TYPES)
    if "stream_format" in fields:
        fields["stream_format"] = _one_of(fields, "stream_format", STREAM_FORMATS)
    if "task_type" in fields:
        normalized = fields["task_type"].lower().replace("_", "").replace("-", "")
        if normalized not in TASK_TYPES:
            names = ", ".join(TASK_TYPES.values())
            raise SpeechError(f"task_type must be one of {names}", "task_type")
        fields["task_type"] = TASK_TYPES[normalized]
    if "language" in fields:
        language = fields["language"].strip().capitalize()
        if language not in LANGUAGES:
            raise SpeechError(f"language must be one of {', '.join(LANGUAGES)}", "language")
        fields["language"] = language


def _one_of(
    fields: Mapping[str, Any], name: str, choices: Mapping[str, Any] | tuple[str, ...]
) -> str:
    value = str(fields[name]).lower()
    if value not in choices:
        raise SpeechError(f"{name} must be one of {', '.join(choices)}", name)
    return value


def _voice_of(fields: Mapping[str, Any]) -> str:
    for name in ("voice", "speaker"):
        if name in fields:
            if not fields[name].strip():
                raise SpeechError(f"{name} must be a non-empty string", name)
            return str(fields[name]).strip()
    return "default"


def _speed_of(fields: Mapping[str, Any]) -> float:
    speed = float(fields.get("speed", 1.0))
    if not 0.25 <= speed <= 4.0:
        raise SpeechError("speed must be between 0.25 and 4.0", "speed")
    return speed


def _references_of(fields: Mapping[str, Any]) -> tuple[VoiceReference, ...]:
    """Return the voice samples named by `ref_audio` or by `references`, not both."""
    if "ref_audio" in fields and fields.get("references"):
        raise SpeechError("set ref_audio or references, not both", "references")
    if "ref_audio" in fields:
        return (VoiceReference("ref_audio", fields["ref_audio"], fields.get("ref_text")),)
    references = fields.get("references", ())
    return tuple(_reference(index, reference) for index, reference in enumerate(references))


def _reference(index: int, one: Mapping[str, Any]) -> VoiceReference:
    path = f"references.{index}"
    for name in (*_SOURCES, "media_type", "text"):
        if one.get(name) is not None and not isinstance(one[name], str):
            raise SpeechError(f"{path}.{name} must be a string", f"{path}.{name}")
    sources = [name for name in _SOURCES if one.get(name) is not None]
    codes = one.get("vq_codes")
    if len(sources) > 1 or (not sources and codes is None):
        names = ", ".join(_SOURCES)
        raise SpeechError(f"{path} must have exactly one of {names}, or vq_codes", path)
    source = sources[0] if sources else None
    return VoiceReference(
        path=f"{path}.{source}" if source else path,
        source=one[source] if source else None,
        text=one.get("text"),
        media_type=one.get("media_type"),
        vq_codes=codes,
    )
