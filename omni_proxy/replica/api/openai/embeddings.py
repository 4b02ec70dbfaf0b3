"""POST /v1/embeddings: one vector per input, with OpenAI's errors.

Invariant: vectors are in the order of the inputs and have the model's width: `dimensions` is
refused. base64 is little-endian float32, as OpenAI's clients decode it.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import (
    CLIENT_ERRORS,
    DetailError,
    json_response,
    to_openai_error,
)
from omni_proxy.replica.api.common.lenient_decode import validate_body
from omni_proxy.replica.api.openai.multi_generation import complete_all, request_ids, total_usage
from omni_proxy.replica.api.openai.to_generate_request import Int64, new_request_id, parse_prompts
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateRequest


class EmbeddingBody(Struct, kw_only=True):
    input: Any
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int64 | None = None


class EmbeddingRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def embed(self) -> Response:
        try:
            return await self._respond(await validate_body(EmbeddingBody))
        except (DetailError, *CLIENT_ERRORS) as error:
            raise to_openai_error(error) from None

    async def _respond(self, body: EmbeddingBody) -> Response:
        if body.dimensions is not None:
            raise DetailError(
                400, "dimensions is not supported: vectors have the model's own width"
            )
        inputs, _ = parse_prompts(body.input, "input")
        requests = [GenerateRequest(prompt=text, model=body.model, task="embed") for text in inputs]
        results = await complete_all(
            self._context.client, requests, request_ids(new_request_id(), len(requests))
        )
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _encoded(_vector(result), body.encoding_format),
            }
            for index, result in enumerate(results)
        ]
        usage = total_usage([result.usage for result in results]) or {}
        return json_response(
            {
                "object": "list",
                "data": data,
                "model": body.model or self._context.model_name,
                "usage": {
                    "prompt_tokens": usage.get("prompt_tokens", 0),
                    "total_tokens": usage.get("prompt_tokens", 0),
                },
            }
        )


def _vector(result: CompletionResult) -> Sequence[float]:
    vector = result.extra.get("embedding")
    if not isinstance(vector, list | tuple) or not vector:
        raise DetailError(
            400, "this server returns no embeddings: its pipeline has no stage for them"
        )
    return vector


def _encoded(vector: Sequence[float], encoding: str | None) -> Sequence[float] | str:
    if encoding != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


def mount(app: QuartTrio, context: RouteContext) -> None:
    routes = EmbeddingRoutes(context)
    app.add_url_rule("/v1/embeddings", "embeddings", routes.embed, methods=["POST"])
