import base64
import struct
from dataclasses import replace

import pytest

from omni_proxy.replica.api.openai.multi_generation import MAX_CONCURRENT
from tests.replica.api.api_fixture import TINY, opened

PATH = "/v1/embeddings"
TASK = "embed"


async def embed(api, **body):
    response = await api.post(PATH, {"input": "hi", **body})
    return response.status_code, await response.get_json()


async def test_each_input_has_its_embedding_in_order(tiny):
    status, body = await embed(tiny, input=["one", "two", "one"], model="m")
    assert status == 200
    assert list(body) == ["object", "data", "model", "usage"]
    assert (body["object"], body["model"]) == ("list", "m")
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    first, second, third = [item["embedding"] for item in body["data"]]
    assert first == third != second
    assert all(item["object"] == "embedding" for item in body["data"])
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0


async def test_base64_holds_the_same_numbers(tiny):
    _, plain = await embed(tiny)
    _, packed = await embed(tiny, encoding_format="base64")
    raw = base64.b64decode(packed["data"][0]["embedding"])
    numbers = struct.unpack(f"<{len(raw) // 4}f", raw)
    assert numbers == pytest.approx(plain["data"][0]["embedding"], rel=1e-6)


async def test_token_ids_are_one_input(tiny):
    status, body = await embed(tiny, input=[5, 6, 7])
    assert (status, len(body["data"]), body["usage"]["prompt_tokens"]) == (200, 1, 3)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"dimensions": 3}, "dimensions is not supported"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"input": ""}, "prompt"),
        ({"input": []}, "input"),
        ({"input": {}}, "input"),
    ],
)
async def test_an_invalid_request_is_a_400_in_openais_error_envelope(tiny, body, reason):
    status, reply = await embed(tiny, **body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert reason in reply["error"]["message"]


async def test_a_pipeline_without_embeddings_refuses_them(api):
    status, body = await embed(api)
    assert status == 400
    assert "returns no embeddings" in body["error"]["message"]


async def test_more_inputs_than_may_be_in_flight_take_turns():
    async with opened(replace(TINY, max_in_flight=MAX_CONCURRENT)) as api:
        status, body = await embed(api, input=[f"text {n}" for n in range(3 * MAX_CONCURRENT)])
        assert (status, len(body["data"])) == (200, 3 * MAX_CONCURRENT)
