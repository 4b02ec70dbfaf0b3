"""POST /v1/embeddings: one vector per input, with OpenAI's errors.

Invariant: vectors come back in the order of the inputs and in the model's own width: `dimensions`
is refused. base64 is little-endian float32, as OpenAI's clients decode it.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.choices import usage_of_all
from omni_proxy.replica.api.errors import CLIENT_ERRORS, Refused, enveloped, reply
from omni_proxy.replica.api.fields import read_body
from omni_proxy.replica.api.lowering import Whole, new_id
from omni_proxy.replica.api.prompts import prompts_of
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.several import complete_all, ids_of
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateRequest


class EmbeddingBody(Struct, kw_only=True):
    input: Any
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = None


class EmbeddingRoutes:
    def __init__(self, served: Served) -> None:
        self._served = served

    async def embed(self) -> Response:
        try:
            return await self._answer(await read_body(EmbeddingBody))
        except (Refused, *CLIENT_ERRORS) as error:
            raise enveloped(error) from None

    async def _answer(self, body: EmbeddingBody) -> Response:
        if body.dimensions is not None:
            raise Refused(400, "dimensions is not supported: vectors have the model's own width")
        inputs, _ = prompts_of(body.input, "input")
        requests = [
            GenerateRequest(prompt=given, model=body.model, task="embed") for given in inputs
        ]
        results = await complete_all(self._served.client, requests, ids_of(new_id(), len(requests)))
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _encoded(_vector(result), body.encoding_format),
            }
            for index, result in enumerate(results)
        ]
        usage = usage_of_all([result.usage for result in results]) or {}
        return reply(
            {
                "object": "list",
                "data": data,
                "model": body.model or self._served.model_name,
                "usage": {
                    "prompt_tokens": usage.get("prompt_tokens", 0),
                    "total_tokens": usage.get("prompt_tokens", 0),
                },
            }
        )


def _vector(result: CompletionResult) -> Sequence[float]:
    vector = result.extra.get("embedding")
    if not isinstance(vector, list | tuple) or not vector:
        raise Refused(400, "this server makes no embeddings: its pipeline has no stage for them")
    return vector


def _encoded(vector: Sequence[float], encoding: str | None) -> Sequence[float] | str:
    if encoding != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


def mount(app: QuartTrio, served: Served) -> None:
    routes = EmbeddingRoutes(served)
    app.add_url_rule("/v1/embeddings", "embeddings", routes.embed, methods=["POST"])
