"""The endpoints of the OpenAPI document that vLLM has, and Anthropic's and OpenAI's newer ones.

Invariant: as in `endpoint_table`: bodies are the Structs that the routes validate.
"""

from __future__ import annotations

from collections.abc import Mapping

from omni_proxy.replica.api.native.abort_request import AbortBody
from omni_proxy.replica.api.openai.chat import ChatBody
from omni_proxy.replica.api.openai.completions import CompletionBody
from omni_proxy.replica.api.openapi.endpoint_table import (
    DETAIL,
    EVENTS,
    TEXT,
    Endpoint,
    Schema,
)
from omni_proxy.replica.api.vllm.messages import CountBody, MessagesBody
from omni_proxy.replica.api.vllm.responses import ResponsesBody
from omni_proxy.replica.api.vllm.token_generation import TokensBody
from omni_proxy.replica.api.vllm.tokenize_routes import (
    DetokenizeBody,
    PromptsBody,
    TokenizeBody,
    TokenListsBody,
)
from omni_proxy.replica.api.vllm.weight_transfer_routes import (
    CheckWeightsAgainst,
    FinishUpdate,
    InitTransfer,
    UpdateWeights,
)

JSON = "application/json"
_ERRORS = ("OpenAIError", DETAIL)
_IDS: Schema = {
    "type": "object",
    "properties": {"request_ids": {"type": "array", "items": {"type": "string"}}},
}
_RPC: Schema = {
    "type": "object",
    "properties": {"method": {"type": "string"}, "kwargs": {"type": "object"}},
    "required": ["method"],
}
_MODE = ("mode", "clear_cache")


def _operation(summary: str, *query: str) -> Endpoint:
    """A control route without a body."""
    return Endpoint(summary=summary, tag="vLLM", locked=True, refuses=_ERRORS, query=query)


def _fact(summary: str, *query: str) -> Endpoint:
    return Endpoint(summary=summary, tag="vLLM", refuses=_ERRORS, query=query)


def _weights(summary: str, *bodies: type) -> Endpoint:
    return Endpoint(
        summary=summary, tag="vLLM", bodies=bodies, locked=True, refuses=_ERRORS,
        body_needed=bodies not in ((), (FinishUpdate,)),
    )  # fmt: skip


def _model(summary: str, *bodies: type, streams: bool = False) -> Endpoint:
    answers = (JSON, EVENTS) if streams else (JSON,)
    return Endpoint(summary=summary, tag="text", bodies=bodies, answers=answers, refuses=_ERRORS)


_NO_CACHE = Endpoint(
    summary="Nothing: there is no such cache", tag="vLLM", locked=True, answers=(TEXT,),
    refuses=_ERRORS,
)  # fmt: skip
ENGINE_ENDPOINTS: Mapping[str, Endpoint] = {
    "abort_request": Endpoint(
        summary="End requests with what they have, as SGLang does", tag="operations",
        bodies=(AbortBody,), locked=True, answers=(TEXT,),
    ),
    "pause": _operation("Hold all requests: keep, wait for or abort those that run", *_MODE),
    "resume": _operation("Go on after a pause"),
    "is_paused": _fact("Whether requests are held"),
    "sleep": _operation("Pause, and drop the prefix cache", "level", "mode"),
    "wake_up": _operation("Go on after a sleep", "tags"),
    "is_sleeping": _fact("Whether it sleeps or is paused"),
    "abort_requests": Endpoint(
        summary="End requests with what they have, or all", tag="vLLM", body=_IDS,
        locked=True, refuses=_ERRORS,
    ),
    "inference_v1_abort_requests": Endpoint(
        summary="End requests with what they have", tag="vLLM", body=_IDS, locked=True,
        answers=(TEXT,), refuses=_ERRORS,
    ),
    "reset_prefix_cache": _operation("Empty the prefix cache", "reset_running_requests"),
    "reset_mm_cache": _NO_CACHE,
    "reset_encoder_cache": _NO_CACHE,
    "collective_rpc": Endpoint(
        summary="reload_weights from kwargs.weights_path; no other method", tag="vLLM", body=_RPC,
        locked=True, refuses=_ERRORS,
    ),
    "get_world_size": _fact("How many ranks of a trainer's group it is", "include_dp"),
    "version": _fact("The version of this program"),
    "load": _fact("How many requests it has"),
    "ping": Endpoint(summary="200 and nothing else", tag="vLLM", answers=(TEXT,)),
    "init_weight_transfer_engine": _weights("Join a trainer's group", InitTransfer),
    "shutdown_weight_transfer_engine": _weights("Leave the trainer's group"),
    "start_weight_update": _weights("Gather new weights from now on"),
    "start_draft_weight_update": _weights("Refused: there is no draft model"),
    "update_weights": _weights("Receive the announced tensors over the group", UpdateWeights),
    "finish_weight_update": _weights("Put in place what was gathered", FinishUpdate),
    "weight_checker": _weights("Hash, overwrite or compare the weights", CheckWeightsAgainst),
    "weight_info": _fact("The version of the weights"),
    "tokenize": _model("The tokens of a prompt or of a chat", TokenizeBody),
    "detokenize": _model("The text of tokens", DetokenizeBody),
    "v1_tokenize": _model("The tokens of prompts, as SGLang tells them", PromptsBody),
    "v1_detokenize": _model("The text of tokens, as SGLang tells it", TokenListsBody),
    "v1_chat_completions_render": _model("The tokens and sampling of a chat", ChatBody),
    "v1_completions_render": _model("The tokens and sampling of prompts", CompletionBody),
    "inference_v1_generate": _model("Continue tokens by tokens", TokensBody, streams=True),
    "v1_messages": _model("Answer a chat in Anthropic's format", MessagesBody, streams=True),
    "v1_messages_count_tokens": _model("How many tokens such a chat has", CountBody),
    "v1_responses": _model("Answer a chat in OpenAI's newer format", ResponsesBody, streams=True),
    "v1_response": _model("A response that is stored"),
    "v1_response_delete": _model("Forget a response"),
    "v1_response_cancel": _model("End a response in the background"),
}  # fmt: skip
