import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

import httpx
import pytest

from omni_proxy.replica.model_file import MODELS, cache_folder
from tests.ports import free_port

MODEL = "smollm2-135m"
FILE = cache_folder(os.environ) / MODELS[MODEL].file

pytestmark = [
    pytest.mark.replica,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None,
        reason="xllamacpp is not installed: pip install 'omni-proxy[replica]'",
    ),
    pytest.mark.skipif(
        not FILE.exists(), reason=f"{FILE} is not there: omni-proxy replica fetch {MODEL}"
    ),
]

PROGRAM = (
    "import sys; from omni_proxy.replica.replica_command import main; sys.exit(main(sys.argv[1:]))"
)
QUESTION = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 12,
    "temperature": 0,
}


@dataclass
class Replica:
    process: subprocess.Popen[str]
    client: httpx.Client


@pytest.fixture
def replica() -> Iterator[Replica]:
    port = str(free_port())
    argv = [sys.executable, "-c", PROGRAM, "--engine", "llamacpp"]
    argv += ["--port", port, "--parallel", "2"]
    with (
        subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60, verify=False
        ) as client,
    ):
        assert process.stderr is not None
        startup_lines = list(takewhile(lambda line: "replica_ready" not in line, process.stderr))
        assert process.poll() is None, startup_lines
        try:
            yield Replica(process, client)
        finally:
            process.kill()


def test_the_llamacpp_engine_serves_requests_and_exits_with_0(replica):
    client = replica.client
    assert client.get("/health").status_code == 200
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [MODEL]
    assert "llamacpp:prompt_tokens_total" in client.get("/metrics").text

    completion = client.post("/v1/chat/completions", json=QUESTION).json()
    assert completion["model"] == MODEL
    assert completion["choices"][0]["message"]["content"].strip()
    assert completion["usage"]["completion_tokens"] <= QUESTION["max_tokens"]

    # llama.cpp reports the tokens that its slot had cached: all of a repeated prompt but the last.
    usage = client.post("/v1/chat/completions", json=QUESTION).json()["usage"]
    reused = usage["prompt_tokens"] - 1
    assert usage["prompt_tokens_details"] == {"cached_tokens": reused}
    messages_usage = client.post("/v1/messages", json=QUESTION).json()["usage"]
    assert (messages_usage["cache_read_input_tokens"], messages_usage["input_tokens"]) == (
        reused,
        1,
    )

    request = {"model": MODEL, "input": ["a cat sat on the mat", "the sea"]}
    embeddings = [
        item["embedding"] for item in client.post("/v1/embeddings", json=request).json()["data"]
    ]
    assert [len(vector) for vector in embeddings] == [576, 576]
    assert [round(sum(x * x for x in vector), 3) for vector in embeddings] == [1, 1]

    with client.stream("POST", "/v1/chat/completions", json=QUESTION | {"stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert sum(bool(delta.get("content")) for delta in deltas) > 1

    replica.process.send_signal(signal.SIGTERM)
    assert replica.process.wait(30) == 0


def test_the_llamacpp_engine_serves_choices_logprobs_biases_and_schemas(replica):
    def chat(**more):
        return replica.client.post("/v1/chat/completions", json=QUESTION | more).json()["choices"]

    assert [choice["index"] for choice in chat(n=2)] == [0, 1]
    content = chat(logprobs=True, top_logprobs=2)[0]["logprobs"]["content"]
    assert len(content[0]["top_logprobs"]) == 2
    assert chat(logit_bias={"100": 100}) != chat()
    named = {"name": "c", "schema": {"enum": ["red", "blue"]}}
    choices = chat(response_format={"type": "json_schema", "json_schema": named})
    assert choices[0]["message"]["content"] in ('"red"', '"blue"')
    invalid = QUESTION | {"response_format": {"type": "xml"}}
    assert replica.client.post("/v1/chat/completions", json=invalid).status_code == 400


def test_a_stream_cut_by_sigterm_does_not_end_cleanly(replica):
    endless = QUESTION | {"stream": True, "max_tokens": 1500, "ignore_eos": True}
    with replica.client.stream("POST", "/v1/chat/completions", json=endless) as stream:
        lines = stream.iter_lines()
        next(lines)
        replica.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert replica.process.wait(30) == 0
