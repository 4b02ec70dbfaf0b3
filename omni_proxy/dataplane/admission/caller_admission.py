"""Applies the limits of a caller's key to an exchange: `begin_call` at its head, `reserve` once its
body is known, `end_call` in `finalize`.

Invariant: `Exchange.caller` is set for a request with a key of `[[keys]]`. `reserved` is
NOT_COUNTED until the exchange counts against the limits; each exchange that counts is ended exactly
once. `begin_call` removes the key from the head's lines, so no worker gets it. Nothing here waits:
above a limit the reply is an immediate 429. Tokens are reserved by an estimate, which neither
decodes the body nor raises.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from omni_proxy.api_keys.caller_limits import ApiCaller, Reason
from omni_proxy.api_keys.caller_lookup import key_in, may_use, without_key_lines
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.settings import Settings
from omni_proxy.fleet.registry import Fleet
from omni_proxy.routing.inspect.body_fields import adapters_of_body
from omni_proxy.routing.inspect.model_field import check_form
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.inspect.response_usage import (
    BYTES_PER_TOKEN,
    OPENED_USAGE,
    USAGE,
    counts_in,
    decode_common_usage,
    estimate_prompt,
)
from omni_proxy.routing.routes import FORM
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead

NOT_COUNTED: Final = -1  # of `reserved`: it does not count against the limits, or no longer
_MAY_NAME_ADAPTERS: Final = re.compile(rb"lora_path|\\u")  # a JSON key may contain escapes
# Never part of a JSON string, in which quotes are escaped.
_BEGINNING: Final = b'"max_'  # searched from the end first, which is much faster than the pattern
_MAX_TOKENS: Final = re.compile(
    rb'"max_(?:completion_|new_|output_)?tokens"[ \t\r\n]*:[ \t\r\n]*([0-9]{1,9})'
)
_EXPLAINED: Final = {
    "max_inflight": "requests in flight",
    "requests_per_minute": "requests in a minute",
    "tokens_per_minute": "tokens in a minute",
}


def begin_call(settings: Settings, exchange: Exchange, head: RequestHead, now: float) -> None:
    """Find the caller, and count the request. Raises HttpError 401 and 429."""
    callers = settings.callers
    try:
        caller = callers.find(key_in(head.lines))
        if callers.keyed:
            head.lines = without_key_lines(head.lines)
        if caller is not None:
            exchange.caller, exchange.reserved = caller, NOT_COUNTED
            if caller.has_no_tokens_left(now):
                raise _refusal(caller, "tokens_per_minute", 1, now)
            reason = caller.begin(now)
            if reason is not None:
                raise _refusal(caller, reason, 0, now)
            exchange.reserved, exchange.request_bucket = 0, caller.request_window.bucket
    except HttpError as error:
        error.close = bool(head.length)  # its body has not been read
        raise


def check_models_form(exchange: Exchange, head: RequestHead) -> None:
    """Raises HttpError 400 if the caller is limited to some models, and the worker might read
    another model from the form than the proxy."""
    caller, route, body = exchange.caller, exchange.route, exchange.body
    if caller is None or not caller.models or route is None or not body:
        return
    if route.body_kind is FORM:
        check_form(body, head.content_type)


def reserve(exchange: Exchange, need: Requirements, fleet: Fleet, size: int, now: float) -> None:
    """Check the model, and reserve tokens for a body of `size` bytes. Raises HttpError 403 and
    429."""
    caller = exchange.caller
    if caller is None:
        return
    if caller.models:
        refused = _refused_model(caller, need, exchange.body, fleet)
        if refused is not None:
            caller.count_refused("model")
            raise _model_refusal(caller, refused)
    if not caller.token_rate:
        return
    tokens = estimate_prompt(size) + max_tokens_in(exchange.body)
    reserved = caller.reserve(tokens, now)
    if reserved is None:
        error = _refusal(caller, "tokens_per_minute", tokens, now)
        caller.cancel(exchange.request_bucket, now)
        exchange.reserved = NOT_COUNTED
        raise error
    exchange.reserved, exchange.token_bucket = reserved, caller.token_window.bucket


def max_tokens_in(body: bytes) -> int:
    """The limit of completion tokens in a JSON body, 0 if it has none."""
    offset = body.rfind(_BEGINNING)
    if offset < 0:
        return 0
    match = _MAX_TOKENS.match(body, offset) or _MAX_TOKENS.search(body, 0, offset)
    return int(match[1]) if match is not None else 0


def begin_complete_call(
    exchange: Exchange, caller: ApiCaller, need: Requirements, body: bytes
) -> bool:
    """`begin_call` and `reserve` for the fast path, if the caller is known and the body complete.
    False if a limit may apply: then nothing is counted, and the coroutine decides."""
    now = exchange.started_at
    if caller.models and (need.model not in caller.models or _MAY_NAME_ADAPTERS.search(body)):
        return False
    tokens = 0
    if not caller.token_rate:
        exchange.reserved = 0
        # inlined: ApiCaller.begin
        if caller.begun < caller.begun_at_next_check and now < caller.until:
            caller.begun += 1
            return True
    else:
        # inlined: estimate_prompt
        tokens = (len(body) + BYTES_PER_TOKEN - 1) // BYTES_PER_TOKEN + max_tokens_in(body)
        remaining = caller.tokens_left - tokens
        if remaining >= 0 and caller.begun < caller.begun_at_next_check and now < caller.until:
            # inlined: ApiCaller.begin, ApiCaller.reserve
            caller.begun += 1
            caller.tokens_left, exchange.reserved = remaining, tokens
            exchange.token_bucket = caller.token_window.bucket
            return True
    if caller.begin(now) is not None:
        return False
    exchange.reserved = 0
    reserved = caller.reserve(tokens, now)
    if reserved is None:
        cancel_call(exchange, now)
        return False
    exchange.reserved, exchange.token_bucket = reserved, caller.token_window.bucket
    return True


def cancel_call(exchange: Exchange, now: float) -> None:
    """Undo `begin_complete_call` immediately after it: the exchange does not count."""
    caller, reserved = exchange.caller, exchange.reserved
    if caller is None or reserved == NOT_COUNTED:
        return
    exchange.reserved = NOT_COUNTED
    if reserved:
        caller.settle(reserved, exchange.token_bucket, 0, now)
    caller.cancel(caller.request_window.bucket, now)


def end_call(exchange: Exchange, caller: ApiCaller) -> None:
    """End the exchange: its actual tokens replace the reserved ones."""
    reserved = exchange.reserved
    if reserved == NOT_COUNTED:
        return
    exchange.reserved = NOT_COUNTED
    prompt, completion = tokens_of(exchange)
    caller.end(reserved, exchange.token_bucket, prompt, completion, exchange.ended_at)


def tokens_of(exchange: Exchange) -> tuple[int, int]:
    """Prompt and completion tokens of an exchange that has ended. If the response does not report
    them, they are estimated from the request's size, and from the chunks of a stream or the bytes
    of another response."""
    prompt, completion = counts_in(exchange.last_chunk)
    if prompt is not None or completion is not None:
        return prompt or 0, completion or 0
    if not exchange.relayed or not 0 < exchange.status < 400:
        return 0, 0  # no worker generated tokens
    guessed = exchange.chunks if exchange.stream else exchange.bytes_out // BYTES_PER_TOKEN
    return estimate_prompt(exchange.bytes_in), guessed


def end_complete_call(exchange: Exchange, caller: ApiCaller, body: bytes) -> None:
    """`end_call` for the fast path, for an exchange that counts and a complete response. If its
    usage does not have the usual form, `end_call` must still be called, and reads `last_chunk`."""
    try:
        usage = decode_common_usage(OPENED_USAGE + body.rpartition(USAGE)[2]).usage
    except (msgspec.DecodeError, ValueError, RecursionError):
        exchange.last_chunk = body
        return
    used, now = usage.prompt_tokens + usage.completion_tokens, exchange.response_head_at
    if used and exchange.token_bucket == caller.token_window.bucket and now < caller.until:
        caller.tokens_left += exchange.reserved - used  # inlined: ApiCaller.settle
    elif caller.token_rate:
        caller.settle(exchange.reserved, exchange.token_bucket, used, now)
    exchange.reserved = NOT_COUNTED
    caller.settled.append(usage)
    if caller.counts_immediately:
        caller.publish()


def _models_of(fleet: Fleet) -> frozenset[str]:
    """The models of all workers; empty if the model of some worker is unknown."""
    if not all(worker.model for worker in fleet.workers):
        return frozenset()
    return frozenset(fleet.models)


def _refused_model(
    caller: ApiCaller, need: Requirements, body: bytes | bytearray | None, fleet: Fleet
) -> str | None:
    """The requested model or adapter that the caller may not use, "" if the request names none;
    None if all are allowed. An adapter in addition to the model (SGLang's `lora_path`) is allowed
    by its own name."""
    if not may_use(caller, need.model, _models_of(fleet)):
        return need.model or ""
    adapters = need.adapters_in_large_body
    if body and not need.large_body_class:
        adapters = adapters_of_body(bytes(body))
    for adapter in sorted(adapters):
        if adapter not in caller.models and f"{need.model}:{adapter}" not in caller.models:
            return adapter
    return None


def _model_refusal(caller: ApiCaller, model: str | None) -> HttpError:
    allowed = ", ".join(caller.entry.models)
    requested = f"the model {model!r}" if model else "a request that names no model"
    return HttpError(
        403, f"this API key does not allow {requested}, only {allowed}", "model_not_allowed",
        type="permission_error",
    )  # fmt: skip


def _refusal(caller: ApiCaller, reason: Reason, tokens: int, now: float) -> HttpError:
    caller.count_refused(reason)
    limit = getattr(caller.entry, reason)
    return HttpError(
        429, f"this API key allows {limit} {_EXPLAINED[reason]}", "rate_limit_exceeded",
        type="rate_limit_error", reason=reason,
    ).with_headers(("retry-after", str(caller.retry_after(reason, tokens, now))))  # fmt: skip
