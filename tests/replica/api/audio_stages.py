"""Two small real stages: one synthesizes sine waves, the other "transcribes" by counting samples.

Words in the text or the prompt control them. SILENT emits no audio, REFUSED and BROKEN fail after
the sentences before them, FASTER doubles the sample rate, and HELD waits until the request is
aborted: `HOLDING` is set while it waits, `ABORTED` at its end.
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
ABORTED = threading.Event()
HOLDING = threading.Event()
REQUESTS: list = []


def wave(sentence: str) -> np.ndarray:
    """The audio of a sentence: the number of words sets its length, that of letters its pitch."""
    count = WORD_SAMPLES * len(sentence.split())
    return np.sin(np.arange(count) * len(sentence) / 50).astype("<f4")


def hold(aborted) -> None:
    HOLDING.set()
    while not aborted():
        ABORTED.wait(0.002)
    ABORTED.set()


def speak(payload, emit_chunk, aborted):
    inputs = payload.data["raw_inputs"]
    REQUESTS.append(payload.request)
    text = inputs["text"] if isinstance(inputs, dict) else inputs
    audio_so_far, rate = b"", RATE
    for sentence in filter(None, (part.strip() for part in text.split("."))):
        if "REFUSED" in sentence:
            raise CallerError("this text is refused")
        if "BROKEN" in sentence:
            raise RuntimeError("the voice broke")
        if "HELD" in sentence:
            hold(aborted)
        if "SILENT" in sentence:
            continue
        rate = RATE * 2 if "FASTER" in sentence else RATE
        samples = wave(sentence).tobytes()
        audio_so_far += samples
        emit_chunk({"audio_data": samples, "sample_rate": rate})
    words = len(text.split())
    usage = {"prompt_tokens": words, "completion_tokens": 2 * words, "total_tokens": 3 * words}
    result = {"audio_data": audio_so_far, "sample_rate": rate, "finish_reason": "stop"}
    return result | {"usage": usage, "engine_time_s": 0.25}


def transcribe(payload, emit_chunk, aborted):
    REQUESTS.append(payload.request)
    (audio,) = payload.data["raw_inputs"]["audios"]
    samples = np.frombuffer(audio["audio_data"], "<f4")
    prompt = payload.request.metadata["asr_params"].get("prompt", "")
    text = f"{len(samples)} samples"
    if "REFUSED" in prompt:
        raise CallerError("this prompt is refused")
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
    result = {"text": f"{text} heard", "language": "en", "segments": segments}
    return result | ({} if "UNTIMED" in prompt else {"duration": seconds})


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
    """One POST to the app, driven as by an ASGI server, and its response."""

    def __init__(self, app, path, body, content_type="application/json"):
        self.app = app
        self.status = None
        self.headers = {}
        self.chunks, self._progress = [], trio.Event()
        self.complete = False
        self.error = None
        self.ended = trio.Event()
        self._in, self._out = trio.open_memory_channel(10)
        self._in.send_nowait({"type": "http.request", "body": body, "more_body": False})
        headers = [(b"content-type", content_type.encode())]
        headers.append((b"content-length", str(len(body)).encode()))
        self.scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"}
        self.scope |= {"path": path, "query_string": b"", "headers": headers}

    async def run(self):
        try:
            await self.app(self.scope, self._out.receive, self._send)
        except* Exception as errors:
            self.error = errors
        self.ended.set()
        self._progress.set()

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        elif message.get("more_body"):
            self.chunks.append(message["body"])
        else:
            self.complete = True
        self._progress.set()
        await trio.lowlevel.checkpoint()

    async def wait_for_chunks(self, count):
        """Wait for this many chunks of the body."""
        while len(self.chunks) < count and not self.ended.is_set():
            self._progress = trio.Event()
            await self._progress.wait()

    def disconnect(self):
        self._in.send_nowait({"type": "http.disconnect"})

    @property
    def body(self):
        return b"".join(self.chunks)


class Replica:
    """An app over a running pipeline."""

    def __init__(self, coordinator, options):
        self.coordinator = coordinator
        self.app = create_app(Client(coordinator), **options)
        self.http = self.app.test_client()

    async def post(self, path, body, content_type="application/json"):
        """Send a complete request; return once the app has ended it."""
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
async def open_replica(config=PIPELINE, **options):
    ABORTED.clear()
    HOLDING.clear()
    REQUESTS.clear()
    async with open_pipeline(config) as (coordinator, runtime):
        await runtime.ready.wait()
        yield Replica(coordinator, options)
