"""A real client and coordinator with one scripted stage: each request has its own script.

The script stands in `stage_params.play`: `chunks` are emitted, `hold` waits until the request is
aborted, `fault` and `bug` fail it, `result` ends it. `samples` in any of them is so much audio.
"""

from __future__ import annotations

import json
import struct
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from werkzeug.datastructures import Headers

from omni_proxy.replica.api.app import create_app
from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.config import PipelineConfig, StageConfig
from omni_proxy.replica.pipeline.http_server import ReplicaServer, bind_listener
from omni_proxy.replica.pipeline.runtime import open_pipeline
from omni_proxy.replica.pipeline.stage import CallerError, FunctionScheduler

RATE = 8000
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
HELLO = {
    "chunks": [{"text": "Hel"}, {"text": "lo"}],
    "result": {"text": "Hello", "finish_reason": "stop", "usage": USAGE},
}
HOLD = {"chunks": [{"text": "Hel"}], "hold": True}
MESSAGES = [{"role": "user", "content": "hi"}]
PATIENCE_SECS = 60


@dataclass
class Heard:
    """The requests of the stage, newest last, and the number of aborted ones."""

    requests: list = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)


HEARD = Heard()


def build(stage_name):
    return FunctionScheduler(stage_name, play, concurrency=4)


def build_newer(stage_name, **params):
    """A text stage with weights of another version."""
    from omni_proxy.replica.text.stage import build as build_text  # imports torch only here

    scheduler = build_text(stage_name, **params)
    scheduler.weight_version = "v2"
    return scheduler


def play(payload, emit_chunk, aborted):
    HEARD.requests.append(payload.request)
    script = (payload.request.params.get("stage_params") or {}).get("play") or HELLO
    for chunk in script.get("chunks", ()):
        emit_chunk(with_audio(chunk))
    waiting = threading.Event()
    while script.get("hold") and not aborted():
        waiting.wait(0.005)
    if aborted():
        HEARD.aborted.set()
    if "fault" in script:
        raise CallerError(script["fault"])
    if "bug" in script:
        raise RuntimeError(script["bug"])
    return with_audio(script.get("result", {}))


def with_audio(data):
    samples = data.get("samples")
    if samples is None:
        return dict(data)
    rest = {key: value for key, value in data.items() if key != "samples"}
    return rest | {"audio_data": struct.pack(f"<{samples}f", *[0.5] * samples), "sample_rate": RATE}


class Answer:
    """A complete response; `pieces` are the chunks as sent."""

    def __init__(self):
        self.status_code = 0
        self.headers = Headers()
        self.pieces = []

    async def get_data(self):
        return b"".join(self.pieces)

    async def get_json(self):
        return json.loads(await self.get_data())


SCRIPTED = PipelineConfig(
    name="scripted",
    entry="play",
    stages=(
        StageConfig(name="play", factory="tests.replica.api.api_fixture:build", terminal=True),
    ),
)
TINY = builtin_pipeline(BuiltinOptions(model="tiny"))


class World:
    """One app over one running pipeline."""

    def __init__(self, client, options):
        self.client = client
        self.options = {"model_name": "fake"} | options
        self.app = create_app(client, **self.options)

    def with_options(self, **options):
        """Another app over the same pipeline."""
        return World(self.client, self.options | options)

    async def call(self, method, path, data=b"", headers=()):
        """Run the app for one request; return the complete response, in any number of chunks.

        Quart's own test client holds ten pieces and then blocks.
        """
        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": target,
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (name.lower().encode(), text.encode()) for name, text in dict(headers).items()
            ],
        }
        answer, over = Answer(), trio.Event()
        asked = iter([{"type": "http.request", "body": data, "more_body": False}])

        async def receive():
            if message := next(asked, None):
                return message
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            await trio.lowlevel.checkpoint()
            if message["type"] == "http.response.start":
                answer.status_code = message["status"]
                answer.headers = Headers([(n.decode(), v.decode()) for n, v in message["headers"]])
            else:
                answer.pieces.append(message["body"])
                if not message.get("more_body"):
                    over.set()

        await self.app(scope, receive, send)
        return answer

    async def get(self, path, **more):
        return await self.call("GET", path, **more)

    async def post(self, path, body=None, **more):
        data = (
            body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        )
        return await self.call("POST", path, data, **more)

    async def ask(self, path, script=None, **body):
        """POST a JSON body with a script; return the response."""
        if script is not None:
            body["stage_params"] = {"play": script}
        return await self.post(path, body)

    async def chat(self, script=None, **body):
        return await self.ask("/v1/chat/completions", script, **{"messages": MESSAGES, **body})

    async def chat_json(self, script=None, **body):
        answer = await self.chat(script, **body)
        assert answer.status_code == 200, await answer.get_data()
        return await answer.get_json()

    async def chat_events(self, script=None, **body):
        answer = await self.chat(script, stream=True, **body)
        return events_of(await answer.get_data())

    @property
    def heard(self):
        return HEARD.requests[-1]


def events_of(data):
    """The payloads of a stream's events, "[DONE]" included."""
    *parts, rest = data.decode().split("\n\n")
    assert rest == "", "the last event is cut"
    assert all(part.startswith("data: ") for part in parts)
    texts = [part.removeprefix("data: ") for part in parts]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


@asynccontextmanager
async def opened(config=SCRIPTED, **options):
    """A world whose stages are ready."""
    HEARD.aborted.clear()
    async with open_pipeline(config) as (coordinator, runtime):
        with trio.fail_after(PATIENCE_SECS):
            await runtime.ready.wait()
        yield World(Client(coordinator), options)


async def until(holds):
    """Poll until `holds()`: the state of another thread cannot be awaited."""
    with trio.fail_after(PATIENCE_SECS):
        while not holds():
            await trio.lowlevel.checkpoint()


async def aborted():
    """Wait until the stage's request was aborted."""
    with trio.fail_after(PATIENCE_SECS):
        seen = await trio.to_thread.run_sync(HEARD.aborted.wait, PATIENCE_SECS)
    assert seen


@asynccontextmanager
async def listening(app):
    """The app on a real port of loopback; yields that port."""
    with bind_listener("127.0.0.1", 0) as listener:
        server = ReplicaServer(app, listener)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve)
            yield listener.getsockname()[1]
            await server.drain(0.2)
