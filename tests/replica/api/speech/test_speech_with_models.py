"""Synthesized speech is transcribed correctly: both over HTTP, with the real models."""

import base64
import json
import os

import pytest

from omni_proxy.replica.model_file import MODELS, cache_folder
from omni_proxy.replica.pipeline.config import PipelineConfig, StageConfig
from tests.replica.api.audio_stages import replica
from tests.replica.api.multipart_bodies import CONTENT_TYPE, form

pytest.importorskip("hibari", reason="speech needs omni-proxy[replica]")
EAR = cache_folder(os.environ) / MODELS["whisper-tiny"].file
pytestmark = [
    pytest.mark.replica,
    pytest.mark.skipif(not EAR.exists(), reason="omni-proxy replica fetch whisper-tiny"),
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


async def test_speech_is_understood_and_the_same_however_it_is_sent():
    async with replica(PIPELINE) as it:
        whole = await it.speech(input=TEXT, seed=1)
        wav = await whole.get_data()
        ask = {"input": TEXT, "seed": 1, "stream_format": "sse"}
        streamed = await it.post("/v1/audio/speech", json.dumps(ask).encode())
        upload = form({"stream": "true"}, [("file", "a.wav", "audio/wav", wav)])
        heard = await it.post("/v1/audio/transcriptions", upload, CONTENT_TYPE)
    assert whole.status_code == 200
    events = [json.loads(line[6:]) for line in streamed.body.split(b"\n\n") if line]
    deltas = [base64.b64decode(event["audio"]) for event in events[:-1]]
    assert len(deltas) >= 2
    assert b"".join(deltas) == wav[44:]
    done = json.loads(heard.body.split(b"\n\n")[-3][6:])
    assert done["text"] == TEXT
    assert done["usage"]["seconds"] == 5
