"""Responses in JSON for public clients, from the tiny model and from a chat model."""

import json
from typing import Literal

import openai
import pytest
import trio
from pydantic import BaseModel, Field

from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from tests.example_counts import thorough
from tests.replica.api.api_fixture import listening, opened

pytest.importorskip("llguidance")

MESSAGES = [{"role": "user", "content": "Invent a person named John. Answer in JSON."}]


class Person(BaseModel):
    name: str = Field(max_length=24)
    age: int = Field(ge=0, le=130)
    mood: Literal["happy", "sad"]
    pets: list[Literal["cat", "dog"]] = Field(max_length=2)


class Pet(BaseModel):
    """A short response, as the chat model takes long for each token."""

    mood: Literal["happy", "sad"]
    name: str = Field(max_length=24)


REQUEST = {"model": "fake", "messages": MESSAGES, "max_tokens": 120}


CHAT_MODEL = pytest.param("smollm2-135m", marks=pytest.mark.replica)
ON_THE_CHAT_MODEL = (
    "test_the_stream_helper_parses_split_events",
    "test_a_response_in_a_schema_has_log_probabilities",
)


def pytest_generate_tests(metafunc):
    """The chat model takes seconds to load, so all tests use it only with --thorough."""
    if "model" in metafunc.fixturenames:
        both = thorough() or metafunc.function.__name__ in ON_THE_CHAT_MODEL
        metafunc.parametrize("model", ["tiny", *[CHAT_MODEL] * both], scope="module")


@pytest.fixture
async def with_url(model):
    """Yields a function that calls another one with the server's base URL, in a thread."""
    async with (
        opened(builtin_pipeline(BuiltinOptions(model=model))) as api,
        listening(api.app) as port,
    ):

        async def use(function):
            await trio.to_thread.run_sync(function, f"http://127.0.0.1:{port}/v1")

        yield use


def client_of(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


async def test_openais_client_parses_responses_and_a_seed_reproduces_them(with_url):
    def use(url):
        with client_of(url) as client:
            responses = [
                client.chat.completions.parse(**REQUEST, response_format=Person, n=2, seed=1)
                for _ in range(2)
            ]
        for response in responses:
            assert [choice.finish_reason for choice in response.choices] == ["stop", "stop"]
            assert all(isinstance(choice.message.parsed, Person) for choice in response.choices)
        first, second = (
            [choice.message.parsed for choice in response.choices] for response in responses
        )
        assert first == second
        assert first[0] != first[1]

    await with_url(use)


async def test_the_stream_helper_parses_split_events(with_url):
    def use(url):
        with client_of(url) as client:
            request = REQUEST | {"temperature": 0}
            complete = client.chat.completions.parse(**request, response_format=Pet)
            with client.chat.completions.stream(**request, response_format=Pet) as stream:
                for _ in stream:
                    pass
                streamed = stream.get_final_completion()
        assert streamed.choices[0].message.parsed == complete.choices[0].message.parsed

    await with_url(use)


async def test_langchain_gets_its_structured_output(with_url):
    langchain = pytest.importorskip("langchain_openai")

    def use(url):
        model = langchain.ChatOpenAI(
            base_url=url, api_key="none", model="fake", max_tokens=120, max_retries=0, seed=3
        )
        person = model.with_structured_output(Person, method="json_schema").invoke(
            "Invent a person."
        )
        assert isinstance(person, Person)

    await with_url(use)


async def test_json_mode_begins_an_object_and_max_tokens_cuts_it(with_url):
    def use(url):
        with client_of(url) as client:
            request = REQUEST | {"max_tokens": 5, "temperature": 0}
            response = client.chat.completions.create(
                **request, response_format={"type": "json_object"}
            )
        (choice,) = response.choices
        assert choice.finish_reason == "length"
        assert choice.message.content.startswith("{")

    await with_url(use)


async def test_a_response_in_a_schema_has_log_probabilities(with_url):
    schema = {"name": "c", "strict": True, "schema": {"enum": ["red", "green", "blue"]}}

    def use(url):
        with client_of(url) as client:
            (choice,) = client.chat.completions.create(
                **REQUEST, response_format={"type": "json_schema", "json_schema": schema},
                logprobs=True, top_logprobs=20, temperature=0,
            ).choices  # fmt: skip
        assert json.loads(choice.message.content) in ("red", "green", "blue")
        content = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert content.decode() == choice.message.content
        assert all(token.logprob <= 0 for token in choice.logprobs.content)

    await with_url(use)


async def test_an_unsupported_schema_is_a_400_before_the_stream(with_url):
    schema = {"name": "c", "schema": {"type": "array", "uniqueItems": True}}

    def use(url):
        with client_of(url) as client, pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                **REQUEST, stream=True,
                response_format={"type": "json_schema", "json_schema": schema},
            )  # fmt: skip
        detail = refused.value.body["detail"]
        assert detail.startswith("response_format.json_schema.schema: ")
        assert "uniqueItems" in detail

    await with_url(use)


async def test_without_llguidance_json_mode_is_a_501_that_names_the_extra(tiny, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    response = await tiny.chat(response_format={"type": "json_object"})
    assert response.status_code == 501
    assert "omni-proxy[replica]" in (await response.get_json())["detail"]


async def test_a_starting_stage_is_assumed_to_support_json_mode(api, monkeypatch):
    fields = {"response_format": {"type": "json_object"}}
    assert (await api.chat(**fields)).status_code == 400
    starting = api.client.health() | {"status": "starting"}
    monkeypatch.setattr(api.client, "health", lambda: starting)
    assert (await api.chat(**fields)).status_code == 200
    assert api.last_request.params["json_schema"] == '{"type": "object"}'


async def test_completions_support_a_schema_too(tiny):
    named = {"name": "c", "schema": {"enum": ["yes", "no"]}}
    request = {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": named}}
    body = await (await tiny.post("/v1/completions", request)).get_json()
    assert body["choices"][0]["text"] in ('"yes"', '"no"')
