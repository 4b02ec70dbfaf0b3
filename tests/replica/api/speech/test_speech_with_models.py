"""Speech is synthesized and transcribed over HTTP with the real models."""

import base64
import json
import os

import pytest

from omni_proxy.replica.model_file import MODELS, cache_folder
from omni_proxy.replica.pipeline.config import PipelineConfig, StageConfig
from tests.replica.api.audio_stages import open_replica
from tests.replica.api.multipart_bodies import CONTENT_TYPE, form

pytest.importorskip("hibari", reason="speech needs omni-proxy[replica]")
WHISPER = cache_folder(os.environ) / MODELS["whisper-tiny"].file
pytestmark = [
    pytest.mark.replica,
    pytest.mark.skipif(
        not WHISPER.exists(), reason="needs the model: omni-proxy replica fetch whisper-tiny"
    ),
]
TEXT = "The capital of France is Paris. It is a large city."
STAGES = "omni_proxy.replica.stages"
PIPELINE = PipelineConfig(
    name="real",
    entry="speak",
    entries={"asr": "transcribe"},
    stages=(
        StageConfig(name="speak", factory=f"{STAGES}.speak:build", terminal=True),
        StageConfig(name="transcribe", factory=f"{STAGES}.transcribe:build", terminal=True),
    ),
)


async def test_transcribed_speech_is_the_input_and_streamed_audio_equals_the_file():
    async with open_replica(PIPELINE) as replica:
        response = await replica.speech(input=TEXT, seed=1)
        wav = await response.get_data()
        body = {"input": TEXT, "seed": 1, "stream_format": "sse"}
        streamed = await replica.post("/v1/audio/speech", json.dumps(body).encode())
        upload = form({"stream": "true"}, [("file", "a.wav", "audio/wav", wav)])
        transcription = await replica.post("/v1/audio/transcriptions", upload, CONTENT_TYPE)
    assert response.status_code == 200
    events = [json.loads(line[6:]) for line in streamed.body.split(b"\n\n") if line]
    deltas = [base64.b64decode(event["audio"]) for event in events[:-1]]
    assert len(deltas) >= 2
    assert b"".join(deltas) == wav[44:]
    done = json.loads(transcription.body.split(b"\n\n")[-3][6:])
    assert done["text"] == TEXT
    assert done["usage"]["seconds"] == 5
