"""A replica with text and speech models serves unmodified client libraries."""

import base64
import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.ports import free_port
from tests.promises.support.omni_program import MODEL, missing, omni

pytestmark = [
    pytest.mark.replica,
    pytest.mark.skipif(bool(missing()), reason=missing() or "all dependencies are installed"),
]
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
NODE = Path(__file__).parents[1] / "support" / "node"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with omni(tmp_path_factory.mktemp("omni"), free_port()) as base:
        yield base


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def normalized(text: str) -> str:
    return " ".join(re.sub(r"[^a-z' ]", " ", text.lower()).split())


def speech_of(client, text: str, **fields) -> bytes:
    arguments = {"model": MODEL, "voice": "alloy", "response_format": "wav", **fields}
    return client.audio.speech.create(input=text, **arguments).content


def transcript_of(client, audio: bytes) -> str:
    return client.audio.transcriptions.create(model=MODEL, file=("a.wav", audio)).text


def chat(client, content, **fields):
    arguments = {"model": MODEL, "temperature": 0, "max_tokens": 24, **fields}
    return client.chat.completions.create(
        messages=[{"role": "user", "content": content}], **arguments
    )


def test_an_audio_question_gets_an_audio_answer(client):
    question = speech_of(client, QUESTION)
    assert normalized(transcript_of(client, question)) == normalized(QUESTION)
    part = {"data": base64.b64encode(question).decode(), "format": "wav"}
    message = (
        chat(
            client,
            [{"type": "input_audio", "input_audio": part}],
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "wav"},
        )
        .choices[0]
        .message
    )
    assert message.content == ANSWER
    assert message.audio.transcript == ANSWER
    assert normalized(transcript_of(client, base64.b64decode(message.audio.data))) == normalized(
        ANSWER
    )


def test_a_stream_has_the_text_of_the_complete_response(client):
    whole = chat(client, QUESTION)
    pieces = list(chat(client, QUESTION, stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content == ANSWER
    assert len(pieces) > 5
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_equal_seeds_give_equal_texts_and_other_seeds_do_not(client):
    def chat_reply(seed):
        arguments = {"temperature": 1.2, "seed": seed, "max_tokens": 8}
        return chat(client, "Tell me about the sea.", **arguments).choices[0].message.content

    first = chat_reply(1)
    assert chat_reply(1) == first
    assert {chat_reply(seed) for seed in (2, 3)} != {first}


def test_sixteen_streams_at_once_all_complete(client):
    def run(number):
        pieces = list(chat(client, f"Count to {number}.", stream=True, max_tokens=4))
        return pieces[-1].choices[0].finish_reason, len(pieces)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(run, range(16)))
    assert all(reason in ("stop", "length") for reason, _ in results)
    assert all(count > 1 for _, count in results)


def test_speech_is_streamed_and_deterministic_for_a_seed(client):
    text = "The river is cold. The mountain is high. The harbour is quiet."
    with client.audio.speech.with_streaming_response.create(
        model=MODEL, voice="alloy", input=text, response_format="pcm",
        extra_body={"stream": True, "stream_format": "audio", "seed": 5},
    ) as streamed:  # fmt: skip
        pieces = list(streamed.iter_bytes())
    whole = speech_of(client, text, response_format="pcm", extra_body={"seed": 5})
    assert b"".join(pieces) == whole
    assert len(whole) > 2 * 24000 * 2


def test_a_transcription_streams_its_text(client):
    audio = speech_of(client, QUESTION)
    events = list(
        client.audio.transcriptions.create(model=MODEL, file=("a.wav", audio), stream=True)
    )
    assert "".join(e.delta for e in events if e.type == "transcript.text.delta").strip() == QUESTION
    assert events[-1].text.strip() == QUESTION


def test_a_repeated_prompt_is_served_from_the_prefix_cache(client):
    prompt = "Once upon a time there was a small grey cat. " * 20
    chat(client, prompt, max_tokens=2)
    again = chat(client, prompt, max_tokens=2).usage
    assert again.prompt_tokens_details.cached_tokens > again.prompt_tokens * 0.9


def test_langchain_chats_and_streams(url):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=24,
        max_retries=0,
    )  # fmt: skip
    response = model.invoke(QUESTION)
    assert response.content == ANSWER
    assert response.usage_metadata["output_tokens"] > 0
    assert "".join(piece.content for piece in model.stream(QUESTION)) == ANSWER


def test_openai_node_works_for_chat_streams_speech_and_transcription(url):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (NODE / "node_modules" / "openai").is_dir():
        pytest.skip(
            "openai-node is not installed: npm install --prefix tests/promises/support/node"
        )
    command = [node, str(NODE / "drive.mjs"), f"{url}/v1", MODEL, QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["whole"] == body["streamed"] == ANSWER
    assert body["tokens"] == 8
    assert body["riff"] == "RIFF"
    assert normalized(body["heard"]) == normalized(QUESTION)


def test_curl_works_for_chat_streams_speech_and_transcription(url, tmp_path):
    def curl(*command):
        done = subprocess.run(
            ["curl", "-sS", "--fail-with-body", "--noproxy", "*", *command],
            capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    json_type = ("-H", "content-type: application/json")
    message = {"role": "user", "content": QUESTION}
    body = {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": 24}
    whole = json.loads(curl(f"{url}/v1/chat/completions", *json_type, "-d", json.dumps(body)))
    assert whole["choices"][0]["message"]["content"] == ANSWER
    stream = curl(
        "-N", f"{url}/v1/chat/completions", *json_type, "-d", json.dumps({**body, "stream": True})
    )
    assert stream.rstrip().endswith(b"data: [DONE]")
    wav = tmp_path / "q.wav"
    wav.write_bytes(
        curl(f"{url}/v1/audio/speech", *json_type, "-d", json.dumps({"input": QUESTION}))
    )
    transcription = json.loads(curl(f"{url}/v1/audio/transcriptions", "-F", f"file=@{wav}"))
    assert normalized(transcription["text"]) == normalized(QUESTION)


def test_models_and_capabilities_match_what_the_replica_supports(client, url):
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.APIStatusError) as refused:
        chat(client, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])
    assert refused.value.status_code == 503
    assert "image_input" in str(refused.value)
