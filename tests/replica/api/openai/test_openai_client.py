"""OpenAI's own client, in a thread, against the tiny model over a real socket."""

import openai
import pytest
import trio

from tests.replica.api.api_fixture import listening

REQUEST = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "temperature": 0,
}


@pytest.fixture
async def with_client(tiny):
    """Yields a function that calls another one with OpenAI's client, in a thread."""
    async with listening(tiny.app) as port:

        def call_with_client(function):
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                function(client)

        async def use(function):
            await trio.to_thread.run_sync(call_with_client, function)

        yield use


async def test_a_chat_with_the_optional_fields_of_the_client(with_client):
    def use(client):
        response = client.chat.completions.create(
            **REQUEST, n=1, user="u", tools=[], stop=None, presence_penalty=0
        )
        assert response.choices[0].message.role == "assistant"
        assert response.choices[0].finish_reason == "length"
        assert response.usage.completion_tokens == 4
        assert response.usage.total_tokens == response.usage.prompt_tokens + 4

    await with_client(use)


async def test_a_streamed_chat_has_the_same_text_and_reports_its_usage(with_client):
    def use(client):
        complete = client.chat.completions.create(**REQUEST)
        chunks = list(
            client.chat.completions.create(
                **REQUEST, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == complete.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices[0].finish_reason == "length"
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [4]

    await with_client(use)


async def test_the_stream_helper_joins_the_deltas(with_client):
    def use(client):
        # The helper joins the deltas as they arrive. The response is cut by `max_tokens`, which the
        # helper treats as unfinished, so its final completion is not read.
        with client.chat.completions.stream(**REQUEST) as stream:
            snapshots = [event for event in stream if event.type == "content.delta"]
        assert snapshots
        assert snapshots[-1].snapshot == "".join(event.delta for event in snapshots)

    await with_client(use)


async def test_completions_models_and_embeddings(with_client):
    def use(client):
        request = {"model": "fake", "prompt": ["a", "b"], "max_tokens": 2}
        response = client.completions.create(**request, logprobs=1)
        assert [choice.index for choice in response.choices] == [0, 1]
        assert len(response.choices[0].logprobs.tokens) == 2
        stream = client.completions.create(**request, stream=True)
        assert {chunk.choices[0].index for chunk in stream} == {0, 1}
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").id == "fake"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("another")
        vectors = client.embeddings.create(model="fake", input=["a", "b"])
        assert len(vectors.data[0].embedding) == len(vectors.data[1].embedding) > 0

    await with_client(use)


async def test_errors_raise_the_clients_exceptions(with_client):
    def use(client):
        with pytest.raises(openai.UnprocessableEntityError):
            client.chat.completions.create(**(REQUEST | {"messages": []}))
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**(REQUEST | {"temperature": -1}))
        assert "temperature" in refused.value.body["detail"]
        with pytest.raises(openai.BadRequestError, match="echo"):
            client.completions.create(model="fake", prompt="a", echo=True)

    await with_client(use)
