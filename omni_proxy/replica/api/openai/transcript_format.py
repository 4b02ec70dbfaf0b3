"""Transcripts as JSON, text, subtitles or a stream of events (api-server.md 1.8).

Invariant: a key whose value is unknown is left out, except in verbose_json. Subtitles use the times
of the segments; nothing is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from omni_proxy.replica.api.common.errors import ClientError, SpeechError
from omni_proxy.replica.pipeline.client import CompletionResult, GenerateChunk

DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class TranscriptResponse:
    """One transcript. `segments` have id, start and end in seconds, and text."""

    text: str
    duration_secs: float | None
    language: str | None = None
    segments: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, result: CompletionResult, duration_secs: float) -> TranscriptResponse:
        """`duration_secs` is that of the upload, used if the pipeline reports none."""
        extra = result.extra
        return cls(
            text=result.text,
            duration_secs=extra.get("duration", duration_secs),
            language=extra.get("language"),
            segments=tuple(extra.get("segments") or ()),
        )

    def plain(self) -> dict[str, Any]:
        return {"text": self.text} | duration_usage(self.duration_secs)

    def verbose(self) -> dict[str, Any]:
        body = {
            "task": "transcribe",
            "language": self.language,
            "duration": self.duration_secs,
            "text": self.text,
            "segments": [_segment(index, segment) for index, segment in enumerate(self.segments)],
        }
        return body | duration_usage(self.duration_secs)

    def srt(self) -> str:
        return "\n".join(
            f"{number}\n{_clock(segment['start'], ',')} --> {_clock(segment['end'], ',')}\n"
            f"{str(segment['text']).strip()}\n"
            for number, segment in enumerate(self.segments, 1)
        )

    def vtt(self) -> str:
        cues = (
            f"{_clock(segment['start'], '.')} --> {_clock(segment['end'], '.')}\n"
            f"{str(segment['text']).strip()}\n"
            for segment in self.segments
        )
        return "\n".join(("WEBVTT\n", *cues))


def duration_usage(duration_secs: float | None) -> dict[str, Any]:
    """Return the usage under its key; empty if the duration is unknown."""
    if duration_secs is None:
        return {}
    return {"usage": {"type": "duration", "seconds": math.ceil(duration_secs)}}


class TranscriptEvents:
    """The stream: deltas, the complete text, `[DONE]`; no `[DONE]` after a failure."""

    def __init__(self, duration_secs: float) -> None:
        self._duration_secs = duration_secs
        self._texts: list[str] = []

    def feed(self, chunk: GenerateChunk) -> list[bytes]:
        events = []
        if chunk.text:
            self._texts.append(chunk.text)
            events.append(_event({"type": "transcript.text.delta", "delta": chunk.text}))
        if chunk.terminal:
            duration = chunk.extra.get("duration", self._duration_secs)
            done = {"type": "transcript.text.done", "text": "".join(self._texts)}
            events += [_event(done | duration_usage(duration)), DONE]
        return events

    def failed(self, error: ClientError | SpeechError) -> bytes:
        return _event({"type": "error", "error": {"message": str(error)}})


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def _segment(index: int, segment: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": index, "start": segment["start"], "end": segment["end"], "text": segment["text"]}


def _clock(seconds: float, separator: str) -> str:
    whole, millis = divmod(round(seconds * 1000), 1000)
    minutes, secs = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{secs:02}{separator}{millis:03}"
