"""What has been heard, written as one answer or as a stream of events (api-server.md 1.8).

Invariant: a key whose value is not known is left out, save in verbose_json. Subtitles are made from
the segments' own times; nothing is guessed.
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
        """`duration_secs` is that of the upload, where the pipeline tells none."""
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
        told = {
            "task": "transcribe",
            "language": self.language,
            "duration": self.duration_secs,
            "text": self.text,
            "segments": [_segment(at, each) for at, each in enumerate(self.segments)],
        }
        return told | duration_usage(self.duration_secs)

    def srt(self) -> str:
        return "\n".join(
            f"{at}\n{_clock(each['start'], ',')} --> {_clock(each['end'], ',')}\n"
            f"{str(each['text']).strip()}\n"
            for at, each in enumerate(self.segments, 1)
        )

    def vtt(self) -> str:
        cues = (
            f"{_clock(each['start'], '.')} --> {_clock(each['end'], '.')}\n"
            f"{str(each['text']).strip()}\n"
            for each in self.segments
        )
        return "\n".join(("WEBVTT\n", *cues))


def duration_usage(duration_secs: float | None) -> dict[str, Any]:
    """Return the usage under its key; empty where the duration is not known."""
    if duration_secs is None:
        return {}
    return {"usage": {"type": "duration", "seconds": math.ceil(duration_secs)}}


class TranscriptEvents:
    """The stream: deltas, the whole text, `[DONE]`; after a failure no `[DONE]`."""

    def __init__(self, duration_secs: float) -> None:
        self._duration_secs = duration_secs
        self._texts: list[str] = []

    def feed(self, chunk: GenerateChunk) -> list[bytes]:
        pieces = []
        if chunk.text:
            self._texts.append(chunk.text)
            pieces.append(_event({"type": "transcript.text.delta", "delta": chunk.text}))
        if chunk.terminal:
            duration = chunk.extra.get("duration", self._duration_secs)
            done = {"type": "transcript.text.done", "text": "".join(self._texts)}
            pieces += [_event(done | duration_usage(duration)), DONE]
        return pieces

    def failed(self, fault: ClientError | SpeechError) -> bytes:
        return _event({"type": "error", "error": {"message": str(fault)}})


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def _segment(at: int, each: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": at, "start": each["start"], "end": each["end"], "text": each["text"]}


def _clock(seconds: float, point: str) -> str:
    whole, millis = divmod(round(seconds * 1000), 1000)
    minutes, secs = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{secs:02}{point}{millis:03}"
