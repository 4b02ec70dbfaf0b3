"""Two small real stages: one synthesizes sine waves, one decodes them. Words in the text control them.

SILENT speaks nothing, REFUSED and BROKEN fail after what came before them, FASTER changes the rate,
HELD lasts until the request is aborted, which `LEFT` tells.
"""

import threading
from contextlib import asynccontextmanager

import numpy as np
import trio

from omni_proxy.replica.api.app import create_app
from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.config import PipelineConfig, StageConfig
from omni_proxy.replica.pipeline.runtime import open_pipeline
from omni_proxy.replica.pipeline.stage import CallerError, FunctionScheduler

RATE = 24_000
WORD_SAMPLES = 120
LEFT = threading.Event()
HOLDING = threading.Event()
SEEN: list = []


def wave(sentence: str) -> np.ndarray:
    """The audio of one sentence: its words are the length, its letters the pitch."""
    count = WORD_SAMPLES * len(sentence.split())
    return np.sin(np.arange(count) * len(sentence) / 50).astype("<f4")


def hold(aborted) -> None:
    HOLDING.set()
    while not aborted():
        LEFT.wait(0.002)
    LEFT.set()


def speak(payload, emit_chunk, aborted):
    inputs = payload.data["raw_inputs"]
    SEEN.append(payload.request)
    text = inputs["text"] if isinstance(inputs, dict) else inputs
    whole, rate = b"", RATE
    for sentence in filter(None, (part.strip() for part in text.split("."))):
        if "REFUSED" in sentence:
            raise CallerError("nobody says that")
        if "BROKEN" in sentence:
            raise RuntimeError("the voice broke")
        if "HELD" in sentence:
            hold(aborted)
        if "SILENT" in sentence:
            continue
        rate = RATE * 2 if "FASTER" in sentence else RATE
        audio = wave(sentence).tobytes()
        whole += audio
        emit_chunk({"audio_data": audio, "sample_rate": rate})
    words = len(text.split())
    usage = {"prompt_tokens": words, "completion_tokens": 2 * words, "total_tokens": 3 * words}
    reported = {"audio_data": whole, "sample_rate": rate, "finish_reason": "stop"}
    return reported | {"usage": usage, "engine_time_s": 0.25}


def transcribe(payload, emit_chunk, aborted):
    SEEN.append(payload.request)
    (audio,) = payload.data["raw_inputs"]["audios"]
    samples = np.frombuffer(audio["audio_data"], "<f4")
    prompt = payload.request.metadata["asr_params"].get("prompt", "")
    text = f"{len(samples)} samples"
    if "REFUSED" in prompt:
        raise CallerError("nobody hears that")
    if "HELD" in prompt and "LATER" not in prompt:
        hold(aborted)
    emit_chunk({"text": text})
    if "HELD" in prompt:
        hold(aborted)
    if "BROKEN" in prompt:
        raise RuntimeError("the ear broke")
    emit_chunk({"text": " heard"})
    seconds = len(samples) / audio["sample_rate"]
    segments = [{"id": 7, "start": 0.0, "end": seconds, "text": f" {text} heard"}]
    reported = {"text": f"{text} heard", "language": "en", "segments": segments}
    return reported | ({} if "UNTIMED" in prompt else {"duration": seconds})


def build_voice(name):
    return FunctionScheduler(name, speak, concurrency=4)


def build_ear(name):
    return FunctionScheduler(name, transcribe, concurrency=6)


PIPELINE = PipelineConfig(
    name="sound",
    entry="speak",
    entries={"tts": "speak", "asr": "transcribe"},
    stages=(
        StageConfig(name="speak", factory=f"{__name__}:build_voice", terminal=True),
        StageConfig(name="transcribe", factory=f"{__name__}:build_ear", terminal=True),
    ),
)


class Call:
    """One POST, driven as a server drives the app, with its response."""

    def __init__(self, app, path, body, content_type="application/json"):
        self.app = app
        self.status = None
        self.headers = {}
        self.pieces, self._came = [], trio.Event()
        self.whole = False
        self.fault = None
        self.over = trio.Event()
        self._in, self._out = trio.open_memory_channel(10)
        self._in.send_nowait({"type": "http.request", "body": body, "more_body": False})
        headers = [(b"content-type", content_type.encode())]
        headers.append((b"content-length", str(len(body)).encode()))
        self.scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"}
        self.scope |= {"path": path, "query_string": b"", "headers": headers}

    async def run(self):
        try:
            await self.app(self.scope, self._out.receive, self._send)
        except* Exception as faults:
            self.fault = faults
        self.over.set()
        self._came.set()

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        elif message.get("more_body"):
            self.pieces.append(message["body"])
        else:
            self.whole = True
        self._came.set()
        await trio.lowlevel.checkpoint()

    async def until(self, count):
        """Wait for this many chunks of the body."""
        while len(self.pieces) < count and not self.over.is_set():
            self._came = trio.Event()
            await self._came.wait()

    def leave(self):
        self._in.send_nowait({"type": "http.disconnect"})

    @property
    def body(self):
        return b"".join(self.pieces)


class Replica:
    """An app over the running pipeline."""

    def __init__(self, coordinator, options):
        self.coordinator = coordinator
        self.app = create_app(Client(coordinator), **options)
        self.http = self.app.test_client()

    async def post(self, path, body, content_type="application/json"):
        """One complete request; returns when the app has ended it."""
        call = Call(self.app, path, body, content_type)
        await call.run()
        return call

    def begin(self, nursery, path, body, content_type="application/json"):
        call = Call(self.app, path, body, content_type)
        nursery.start_soon(call.run)
        return call

    async def speech(self, **fields):
        return await self.http.post("/v1/audio/speech", json=fields)

    @property
    def live(self):
        return self.coordinator.live_count


@asynccontextmanager
async def replica(config=PIPELINE, **options):
    LEFT.clear()
    HOLDING.clear()
    SEEN.clear()
    async with open_pipeline(config) as (coordinator, runtime):
        await runtime.ready.wait()
        yield Replica(coordinator, options)
