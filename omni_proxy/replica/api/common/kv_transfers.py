"""KV transfers at the HTTP routes: from a body's fields to requests, and into the response.

Invariant: on a replica without a role nothing here has an effect. The fields are those of the raw
body, since every route that generates text takes them.
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

LEAST_FIELDS = ("min_tokens", "min_completion_tokens")
RELEASE_SECS = 10.0
REQUEST_ID_HEADER = "X-Request-Id"


def with_transfers(
    context: RouteContext,
    given: Any,
    requests: Sequence[GenerateRequest],
    request_id: str,
    prompts: int = 1,
) -> list[GenerateRequest]:
    """The requests of one body, with the transfer of each. Raises DetailError 400."""
    fields = given if isinstance(given, dict) else {}
    try:
        specs = context.transfer.specs(fields, request_id, len(requests), prompts)
    except InvalidTransfer as error:
        raise DetailError(400, str(error)) from None
    return [
        each
        if spec is None
        else replace(each, extra_params={**each.extra_params, "kv_transfer": to_params(spec)})
        for each, spec in zip(requests, specs, strict=True)
    ]


def leg_fields(context: RouteContext, given: dict[str, Any]) -> dict[str, Any]:
    """A body's fields without what a prefill leg has no use for: vLLM's router asks every one for
    a token at least, and the answer is decode's."""
    if context.transfer.role != "prefill":
        return given
    return {name: value for name, value in given.items() if name not in LEAST_FIELDS}


def transfer_answer(results: Iterable[CompletionResult]) -> dict[str, Any]:
    """The `kv_transfer_params` at the top of a prefill leg's response, if a KV was kept."""
    kept = (result.extra.get(PARAMS) for result in results)
    params = next((each for each in kept if each is not None), None)
    return {} if params is None else {PARAMS: params}


async def release_kept(context: RouteContext, which: dict[str, Any]) -> None:
    """Free KVs that wait to be fetched although their requests have ended.

    `which` has the `ids` of requests, the `prefix` of ids, or `all`.
    """
    if context.transfer.role == "prefill":
        await context.client.admin("release_kv", which, None, RELEASE_SECS)


def given_id(context: RouteContext, *named: object) -> str | None:
    """The request's id: the first of the body's that is a text, else, where a router prepared the
    request for vLLM, that of the header; None if there is none."""
    for name in named:
        if isinstance(name, str) and name:
            return name
    if context.transfer.role != "null" and context.transfer.connector != "sglang":
        return request.headers.get(REQUEST_ID_HEADER)
    return None
