"""Responses in JSON, requested by public clients: on the tiny model, and on a chat model."""

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
    """Short: on the chat model each token takes a while."""

    mood: Literal["happy", "sad"]
    name: str = Field(max_length=24)


ASK = {"model": "fake", "messages": MESSAGES, "max_tokens": 120}


REAL = pytest.param("smollm2-135m", marks=pytest.mark.replica)
ON_A_REAL_ONE = (
    "test_the_stream_helper_parses_split_events",
    "test_an_answer_in_a_schema_has_its_log_probabilities",
)


def pytest_generate_tests(metafunc):
    """A model that can chat takes seconds to load: all of these run on it with --thorough."""
    if "model" in metafunc.fixturenames:
        both = thorough() or metafunc.function.__name__ in ON_A_REAL_ONE
        metafunc.parametrize("model", ["tiny", *[REAL] * both], scope="module")


@pytest.fixture
async def using(model):
    """Runs a function of the base URL beside the server, in a thread."""
    async with (
        opened(builtin_pipeline(BuiltinOptions(model=model))) as world,
        listening(world.app) as port,
    ):

        async def use(function):
            await trio.to_thread.run_sync(function, f"http://127.0.0.1:{port}/v1")

        yield use


def client_of(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


async def test_openais_client_parses_an_answer_and_a_seed_gives_it_again(using):
    def use(url):
        with client_of(url) as client:
            answers = [
                client.chat.completions.parse(**ASK, response_format=Person, n=2, seed=1)
                for _ in range(2)
            ]
        for answer in answers:
            assert [each.finish_reason for each in answer.choices] == ["stop", "stop"]
            assert all(isinstance(each.message.parsed, Person) for each in answer.choices)
        first, second = ([each.message.parsed for each in one.choices] for one in answers)
        assert first == second
        assert first[0] != first[1]

    await using(use)


async def test_the_stream_helper_parses_split_events(using):
    def use(url):
        with client_of(url) as client:
            ask = ASK | {"temperature": 0}
            whole = client.chat.completions.parse(**ask, response_format=Pet)
            with client.chat.completions.stream(**ask, response_format=Pet) as stream:
                for _ in stream:
                    pass
                streamed = stream.get_final_completion()
        assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed

    await using(use)


async def test_langchain_gets_its_structured_output(using):
    langchain = pytest.importorskip("langchain_openai")

    def use(url):
        model = langchain.ChatOpenAI(
            base_url=url, api_key="none", model="fake", max_tokens=120, max_retries=0, seed=3
        )
        found = model.with_structured_output(Person, method="json_schema").invoke(
            "Invent a person."
        )
        assert isinstance(found, Person)

    await using(use)


async def test_json_mode_begins_an_object_and_a_bound_cuts_it(using):
    def use(url):
        with client_of(url) as client:
            ask = ASK | {"max_tokens": 5, "temperature": 0}
            answer = client.chat.completions.create(**ask, response_format={"type": "json_object"})
        (choice,) = answer.choices
        assert choice.finish_reason == "length"
        assert choice.message.content.startswith("{")

    await using(use)


async def test_an_answer_in_a_schema_has_its_log_probabilities(using):
    schema = {"name": "c", "strict": True, "schema": {"enum": ["red", "green", "blue"]}}

    def use(url):
        with client_of(url) as client:
            (choice,) = client.chat.completions.create(
                **ASK, response_format={"type": "json_schema", "json_schema": schema},
                logprobs=True, top_logprobs=20, temperature=0,
            ).choices  # fmt: skip
        assert json.loads(choice.message.content) in ("red", "green", "blue")
        reported = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
        assert reported.decode() == choice.message.content
        assert all(each.logprob <= 0 for each in choice.logprobs.content)

    await using(use)


async def test_an_unsupported_schema_is_a_400_before_the_stream(using):
    schema = {"name": "c", "schema": {"type": "array", "uniqueItems": True}}

    def use(url):
        with client_of(url) as client, pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                **ASK, stream=True,
                response_format={"type": "json_schema", "json_schema": schema},
            )  # fmt: skip
        output = refused.value.body["detail"]
        assert output.startswith("response_format.json_schema.schema: ")
        assert "uniqueItems" in output

    await using(use)


async def test_without_the_package_it_is_a_501_that_names_the_extra(tiny, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    answer = await tiny.chat(response_format={"type": "json_object"})
    assert answer.status_code == 501
    assert "omni-proxy[replica]" in (await answer.get_json())["detail"]


async def test_a_stage_that_is_not_ready_is_not_taken_for_one_that_cannot(world, monkeypatch):
    ask = {"response_format": {"type": "json_object"}}
    assert (await world.chat(**ask)).status_code == 400
    reported = world.client.health() | {"status": "starting"}
    monkeypatch.setattr(world.client, "health", lambda: reported)
    assert (await world.chat(**ask)).status_code == 200
    assert world.heard.params["json_schema"] == '{"type": "object"}'


async def test_completions_can_be_held_to_a_schema_too(tiny):
    named = {"name": "c", "schema": {"enum": ["yes", "no"]}}
    ask = {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": named}}
    body = await (await tiny.post("/v1/completions", ask)).get_json()
    assert body["choices"][0]["text"] in ('"yes"', '"no"')
