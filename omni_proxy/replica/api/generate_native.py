"""POST /generate as SGLang itself speaks it: text or token ids in, text and meta_info out.

Invariant: a streamed event holds everything so far, never a difference; a list of prompts is
answered by a list in the same order. Sampling keys of SGLang that mean nothing here are ignored.
Logprobs are given where they are asked for, and asked for by `return_logprob: true` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import trio
from msgspec import Struct
from quart import Response

from omni_proxy.replica.api.errors import Refused, reply
from omni_proxy.replica.api.fields import read
from omni_proxy.replica.api.lowering import Count, Whole, new_id, stops_of
from omni_proxy.replica.api.prompts import Prompt, is_ids, prompts_of
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.several import complete_all, ids_of
from omni_proxy.replica.api.sse import Event, EventStream, stream_response
from omni_proxy.replica.pipeline.requests import (
    CompletionResult,
    GenerateChunk,
    GenerateRequest,
    SamplingParams,
)

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's


class NativeSampling(Struct, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    sampling_seed: Whole | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    max_new_tokens: Count | None = None
    ignore_eos: bool | None = None
    n: Whole | None = None


class NativeBody(Struct, kw_only=True):
    text: Any = None
    input_ids: Any = None
    rid: str | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None


def speaks_native(body: Any) -> bool:
    if not isinstance(body, dict):
        return False
    if body.get("text") is not None or body.get("rid") is not None:
        return True
    ids = body.get("input_ids")
    nested = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    return nested or (ids is not None and bool(body.get("stream")))


class NativeRoute:
    def __init__(self, served: Served) -> None:
        self._served = served

    async def answer(self, given: Any) -> Response:
        body = read(NativeBody, given)
        prompts, batched = _prompts(body)
        request_id = new_id(body.rid)
        ids = ids_of(request_id, len(prompts))
        requests = [_lowered(body, prompt) for prompt in prompts]
        served = self._served
        timing = served.meters.timed(served.model_name)
        logprobs = bool(body.return_logprob)
        if body.stream:
            if batched:
                raise Refused(400, "a list of prompts cannot be streamed: send one request each")
            generation = served.client.generate(requests[0], request_id)
            cut = served.cut_failed_streams
            shape = NativeTold(request_id, logprobs=logprobs)
            return stream_response(EventStream(generation, shape, timing, cut=cut))
        started_secs = trio.current_time()
        try:
            results = await complete_all(served.client, requests, ids)
            timing.ended()
        finally:
            timing.left()
        answers = []
        for each, result in zip(ids, results, strict=True):
            told = NativeTold(each, logprobs=logprobs, started_secs=started_secs)
            answers.append(told.whole(result))
        return reply(answers if batched else answers[0])


class NativeTold:
    """One answer as it grows."""

    def __init__(
        self, request_id: str, *, logprobs: bool, started_secs: float | None = None
    ) -> None:
        self._request_id = request_id
        self._wants_logprobs = logprobs
        self._started_secs = trio.current_time() if started_secs is None else started_secs
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[Any] | None = None

    def whole(self, result: CompletionResult) -> dict[str, Any]:
        """Raises Refused 501 where logprobs were asked for and the pipeline has none."""
        if self._wants_logprobs and result.logprobs is None:
            told = "this pipeline returns no logprobs; leave return_logprob out to go without"
            raise Refused(501, told)
        self._add(result.text, result.token_ids, result.logprobs)
        return self._told(result.finish_reason or "stop", result)

    def feed(self, chunk: GenerateChunk) -> Iterator[Event]:
        if not (chunk.text or chunk.token_ids or chunk.terminal):
            return
        self._add(chunk.text, chunk.token_ids, chunk.logprobs)
        reason = (chunk.finish_reason or "stop") if chunk.terminal else None
        yield self._told(reason, chunk)

    def _add(self, text: str, tokens: Sequence[int], logprobs: Sequence[Any] | None) -> None:
        self._text += text
        self._tokens += tokens
        if logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs]

    def _told(self, reason: str | None, latest: GenerateChunk | CompletionResult) -> Event:
        usage = latest.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        generated = usage.get("completion_tokens", len(self._tokens))
        finish: dict[str, Any] | None = None
        if reason is not None:
            finish = {"type": reason} | ({"length": generated} if reason == "length" else {})
        meta: dict[str, Any] = {
            "id": self._request_id,
            "finish_reason": finish,
            "prompt_tokens": usage.get("prompt_tokens"),
            "weight_version": latest.weight_version,
            "completion_tokens": generated,
            "cached_tokens": details.get("cached_tokens") or 0,
            "e2e_latency": trio.current_time() - self._started_secs,
        }
        if self._wants_logprobs:
            meta["output_token_logprobs"] = self._logprobs
        return {"text": self._text, "output_ids": list(self._tokens), "meta_info": meta}


def _prompts(body: NativeBody) -> tuple[list[Prompt], bool]:
    """Raises Refused 400."""
    if body.text is not None and body.input_ids is not None:
        raise Refused(400, "give one of text and input_ids, not both")
    if body.input_ids is None:
        if isinstance(body.text, str) or (
            isinstance(body.text, list) and all(isinstance(each, str) for each in body.text)
        ):
            return prompts_of(body.text, "text")
        raise Refused(400, "text must be a string or a list of strings")
    if is_ids(body.input_ids) or (
        isinstance(body.input_ids, list) and all(map(is_ids, body.input_ids))
    ):
        return prompts_of(body.input_ids, "input_ids")
    raise Refused(400, "input_ids must be a list of token ids, or a list of such lists")


def _lowered(body: NativeBody, prompt: Prompt) -> GenerateRequest:
    given = body.sampling_params or NativeSampling()
    if (given.n or 1) != 1:
        raise Refused(400, "sampling_params.n must be 1: this server makes one answer per prompt")
    limit = given.max_new_tokens
    sampling = SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        seed=given.seed if given.sampling_seed is None else given.sampling_seed,
        max_new_tokens=DEFAULT_MAX_NEW_TOKENS if limit is None else limit,
        stop=stops_of(given.stop),
        stop_token_ids=tuple(given.stop_token_ids or ()),
        logprobs=bool(body.return_logprob),
        ignore_eos=bool(given.ignore_eos),
    )
    return GenerateRequest(
        prompt=prompt, sampling=sampling, stream=bool(body.stream), task="completion"
    )
