"""OpenAI's own client against the tiny model, over a real socket, from a thread of its own."""

import openai
import pytest
import trio

from tests.replica.api.api_fixture import listening

ASK = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "temperature": 0,
}


@pytest.fixture
async def using(tiny):
    """Runs a function of a client beside the server."""
    async with listening(tiny.app) as port:

        def used(function):
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                function(client)

        async def use(function):
            await trio.to_thread.run_sync(used, function)

        yield use


async def test_a_chat_with_all_that_the_client_likes_to_send(using):
    def use(client):
        answer = client.chat.completions.create(
            **ASK, n=1, user="u", tools=[], stop=None, presence_penalty=0
        )
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 4
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4

    await using(use)


async def test_a_streamed_chat_is_the_same_text_and_reports_its_usage(using):
    def use(client):
        whole = client.chat.completions.create(**ASK)
        chunks = list(
            client.chat.completions.create(
                **ASK, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices[0].finish_reason == "length"
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [4]

    await using(use)


async def test_the_stream_helper_puts_the_answer_together(using):
    def use(client):
        # Without an end of the model the helper treats the response as unfinished, so no bound
        # is set that could be reached; it joins the deltas as they arrive.
        with client.chat.completions.stream(**ASK) as stream:
            snapshots = [event for event in stream if event.type == "content.delta"]
        assert snapshots
        assert snapshots[-1].snapshot == "".join(event.delta for event in snapshots)

    await using(use)


async def test_completions_models_and_embeddings(using):
    def use(client):
        ask = {"model": "fake", "prompt": ["a", "b"], "max_tokens": 2}
        answer = client.completions.create(**ask, logprobs=1)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert len(answer.choices[0].logprobs.tokens) == 2
        stream = client.completions.create(**ask, stream=True)
        assert {chunk.choices[0].index for chunk in stream} == {0, 1}
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").id == "fake"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("another")
        vectors = client.embeddings.create(model="fake", input=["a", "b"])
        assert len(vectors.data[0].embedding) == len(vectors.data[1].embedding) > 0

    await using(use)


async def test_errors_are_the_clients_own(using):
    def use(client):
        with pytest.raises(openai.UnprocessableEntityError):
            client.chat.completions.create(**(ASK | {"messages": []}))
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**(ASK | {"temperature": -1}))
        assert "temperature" in refused.value.body["detail"]
        with pytest.raises(openai.BadRequestError, match="echo"):
            client.completions.create(model="fake", prompt="a", echo=True)

    await using(use)
