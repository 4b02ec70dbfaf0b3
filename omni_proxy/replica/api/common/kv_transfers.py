"""KV transfer fields of the HTTP routes: read from request bodies, written into responses.

Invariant: without a prefill or decode role, the fields have no effect. They are read from the raw
body, because every route that generates text accepts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quart import request

from omni_proxy.replica.api.common.errors import DetailError
from omni_proxy.replica.kv_transfer.request_fields import PARAMS, InvalidTransfer, to_params
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateRequest

if TYPE_CHECKING:
    from omni_proxy.replica.api.route_context import RouteContext

MIN_FIELDS = ("min_tokens", "min_completion_tokens")
RELEASE_SECS = 10.0
REQUEST_ID_HEADER = "X-Request-Id"


def with_transfers(
    context: RouteContext,
    payload: Any,
    requests: Sequence[GenerateRequest],
    request_id: str,
    prompts: int = 1,
) -> list[GenerateRequest]:
    """Return the requests of one body, each with its KV transfer. Raises DetailError 400."""
    fields = payload if isinstance(payload, dict) else {}
    try:
        specs = context.transfer.specs(fields, request_id, len(requests), prompts)
    except InvalidTransfer as error:
        raise DetailError(400, str(error)) from None
    return [
        request
        if spec is None
        else replace(request, extra_params={**request.extra_params, "kv_transfer": to_params(spec)})
        for request, spec in zip(requests, specs, strict=True)
    ]


def leg_fields(context: RouteContext, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body's fields; for a prefill leg, without the minimum token counts.

    vLLM's router sets `min_tokens` on every leg, but only the decode leg generates the response.
    """
    if context.transfer.role != "prefill":
        return fields
    return {name: value for name, value in fields.items() if name not in MIN_FIELDS}


def transfer_fields(results: Iterable[CompletionResult]) -> dict[str, Any]:
    """The `kv_transfer_params` at the top of a prefill leg's response, if a KV was kept."""
    all_params = (result.extra.get(PARAMS) for result in results)
    params = next((params for params in all_params if params is not None), None)
    return {} if params is None else {PARAMS: params}


async def release_kept(context: RouteContext, which: dict[str, Any]) -> None:
    """Free kept KVs of requests that have ended but whose KV was not fetched yet.

    `which` selects them by the `ids` of requests, by the `prefix` of ids, or `all` of them.
    """
    if context.transfer.role == "prefill":
        await context.client.admin("release_kv", which, None, RELEASE_SECS)


def caller_request_id(context: RouteContext, *body_ids: object) -> str | None:
    """Return the request's id, or None: the first non-empty string of `named`, the body's ids.

    Without one, it is the request id header, if the replica has a role and a vLLM connector.
    """
    for body_id in body_ids:
        if isinstance(body_id, str) and body_id:
            return body_id
    if context.transfer.role != "null" and context.transfer.connector != "sglang":
        return request.headers.get(REQUEST_ID_HEADER)
    return None
