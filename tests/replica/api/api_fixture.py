"""A real client and coordinator with one scripted stage: each request brings its own script.

`stage_params.play` is the script: `chunks` are emitted, `hold` waits until the request is aborted,
`fault` and `bug` fail the request, and `result` is its result. `samples` in a chunk or a result
adds that number of audio samples.
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
from omni_proxy.replica.http_server import ReplicaServer, bind_listener
from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.config import PipelineConfig, StageConfig
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
TIMEOUT_SECS = 60


@dataclass
class Recorded:
    """The requests that reached the stage, newest last; `aborted` is set once one was aborted."""

    requests: list = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)


RECORDED = Recorded()


def build(stage_name):
    return FunctionScheduler(stage_name, play, concurrency=4)


def build_newer(stage_name, **params):
    """A text stage with weights of another version."""
    from omni_proxy.replica.stages.text import build as build_text  # imports torch only here

    scheduler = build_text(stage_name, **params)
    scheduler.weight_version = "v2"
    return scheduler


def play(payload, emit_chunk, aborted):
    RECORDED.requests.append(payload.request)
    script = (payload.request.params.get("stage_params") or {}).get("play") or HELLO
    for chunk in script.get("chunks", ()):
        emit_chunk(with_audio(chunk))
    waiting = threading.Event()
    while script.get("hold") and not aborted():
        waiting.wait(0.005)
    if aborted():
        RECORDED.aborted.set()
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


class Response:
    """A complete response; `chunks` are the pieces of its body as the app sent them."""

    def __init__(self):
        self.status_code = 0
        self.headers = Headers()
        self.chunks = []

    async def get_data(self):
        return b"".join(self.chunks)

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


class Api:
    """One app over one running pipeline, called in process."""

    def __init__(self, client, options):
        self.client = client
        self.options = {"model_name": "fake"} | options
        self.app = create_app(client, **self.options)

    def with_options(self, **options):
        """Another app over the same pipeline."""
        return Api(self.client, self.options | options)

    async def call(self, method, path, data=b"", headers=()):
        """Run the app for one request; return its complete response.

        Quart's test client is not used: it buffers ten chunks of a response and then blocks.
        """
        route, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": route,
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (name.lower().encode(), text.encode()) for name, text in dict(headers).items()
            ],
        }
        response, ended = Response(), trio.Event()
        messages = iter([{"type": "http.request", "body": data, "more_body": False}])

        async def receive():
            if message := next(messages, None):
                return message
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            await trio.lowlevel.checkpoint()
            if message["type"] == "http.response.start":
                response.status_code = message["status"]
                response.headers = Headers(
                    [(n.decode(), v.decode()) for n, v in message["headers"]]
                )
            else:
                response.chunks.append(message["body"])
                if not message.get("more_body"):
                    ended.set()

        await self.app(scope, receive, send)
        return response

    async def get(self, path, **more):
        return await self.call("GET", path, **more)

    async def post(self, path, body=None, **more):
        data = (
            body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        )
        return await self.call("POST", path, data, **more)

    async def post_script(self, path, script=None, **body):
        """POST a JSON body that includes a script; return the response."""
        if script is not None:
            body["stage_params"] = {"play": script}
        return await self.post(path, body)

    async def chat(self, script=None, **body):
        return await self.post_script(
            "/v1/chat/completions", script, **{"messages": MESSAGES, **body}
        )

    async def chat_json(self, script=None, **body):
        response = await self.chat(script, **body)
        assert response.status_code == 200, await response.get_data()
        return await response.get_json()

    async def chat_events(self, script=None, **body):
        response = await self.chat(script, stream=True, **body)
        return events_of(await response.get_data())

    @property
    def last_request(self):
        return RECORDED.requests[-1]


def events_of(data):
    """The payloads of a stream's events, "[DONE]" included."""
    *parts, rest = data.decode().split("\n\n")
    assert rest == "", "the last event is incomplete"
    assert all(part.startswith("data: ") for part in parts)
    texts = [part.removeprefix("data: ") for part in parts]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


@asynccontextmanager
async def opened(config=SCRIPTED, **options):
    """The API of a pipeline, once its stages are ready."""
    RECORDED.aborted.clear()
    async with open_pipeline(config) as (coordinator, runtime):
        with trio.fail_after(TIMEOUT_SECS):
            await runtime.ready.wait()
        yield Api(Client(coordinator), options)


async def until(condition):
    """Poll until `condition()`: the state of another thread cannot be awaited."""
    with trio.fail_after(TIMEOUT_SECS):
        while not condition():
            await trio.lowlevel.checkpoint()


async def aborted():
    """Wait until the stage's request was aborted."""
    with trio.fail_after(TIMEOUT_SECS):
        was_aborted = await trio.to_thread.run_sync(RECORDED.aborted.wait, TIMEOUT_SECS)
    assert was_aborted


@asynccontextmanager
async def listening(app):
    """Serve the app on a loopback port; yields the port."""
    with bind_listener("127.0.0.1", 0) as listener:
        server = ReplicaServer(app, listener)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve)
            yield listener.getsockname()[1]
            await server.drain(0.2)
