"""The endpoints of the OpenAPI document: purpose, bodies, responses and error formats.

Invariant: bodies are the Structs that the routes validate, and fields without a Struct are those of
the table that checks them, so that the document cannot differ from the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from omni_proxy.replica.api.openai.chat import ChatBody
from omni_proxy.replica.api.openai.completions import CompletionBody
from omni_proxy.replica.api.openai.embeddings import EmbeddingBody
from omni_proxy.replica.api.openai.transcriptions import TranscriptionFields
from omni_proxy.replica.api.sglang import admin_operations, weight_routes
from omni_proxy.replica.api.sglang.admin_operations import OperationBody, OperationRoute
from omni_proxy.replica.api.sglang.generate import AbortBody, RolloutBody, SglangBody
from omni_proxy.replica.api.sglang.profile_routes import StartBody, StartEventsBody, StopBody
from omni_proxy.replica.api.speech.speech_fields import FIELD_TYPES
from omni_proxy.replica.api.vllm.anthropic_messages import CountBody, MessagesBody
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

JSON, FORM, TEXT = "application/json", "multipart/form-data", "text/plain"
EVENTS = "text/event-stream"
DETAIL = "Detail"
OPENAI = ("OpenAIError", DETAIL)
Schema = dict[str, Any]

# Schema of a field without a Struct, by the description in its error message.
_KINDS: Mapping[str, Schema] = {
    "a string": {"type": "string"},
    "true or false": {"type": "boolean"},
    "a number": {"type": "number"},
    "an integer": {"type": "integer"},
    "an integer above 0": {"type": "integer", "minimum": 1},
    "an integer of 0 or more": {"type": "integer", "minimum": 0},
    "an object": {"type": "object"},
    "a list of objects": {"type": "array", "items": {"type": "object"}},
}
_FILE: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
_TEXT: Schema = {"type": "string"}
_OPERATIONS = {
    "pause_generation": "Pause generation",
    "continue_generation": "Continue after a pause",
    "update_weights_from_disk": "Load new weights from disk and swap them in",
    "read_weights_ahead": "Prefetch a weights file while it is being written",
    "init_weights_update_group": "Join a trainer's group",
    "destroy_weights_update_group": "Leave a trainer's group",
    "update_weights_from_distributed": "Receive new weights over a group and swap them in",
    "prepare_weights_update": "Prepare to receive new weights over a group",
    "complete_weights_update": "Swap in the received weights",
    "begin_weight_update": "Begin a session that gathers updates",
    "end_weight_update": "Swap in the gathered updates",
    "weights_checker": "Hash, snapshot or compare the weights",
    "update_weights_from_tensor": "Load new weights from the body; 501 unless enabled",
    "update_weight_version": "Set the weight version",
}
_CHAT, _SOUND, _INFO = "text", "audio", "information"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint.

    The request body is one of the Structs in `bodies`, or has the schema `body`; `takes` is its
    media type. `response_types` are the media types of responses, `refuses` the error formats; any route
    may answer 405 and 413 with a `Detail`. A `locked` endpoint needs the admin key, if one is set.
    `query` are query parameters.
    """

    summary: str
    tag: str
    bodies: tuple[type[Struct], ...] = ()
    body: Schema | None = None
    takes: str = JSON
    body_needed: bool = True
    response_types: tuple[str, ...] = (JSON,)
    refuses: tuple[str, ...] = (DETAIL,)
    locked: bool = False
    query: tuple[str, ...] = ()


def _speech() -> Schema:
    fields = {name: _KINDS[kind.description] for name, kind in FIELD_TYPES.items()}
    return {"type": "object", "properties": fields, "required": ["input"]}


def _batch() -> Schema:
    item_schema = _speech()
    items = {"type": "array", "minItems": 1, "items": item_schema}
    return {"type": "object", "properties": {**item_schema["properties"], "items": items},
            "required": ["items"]}  # fmt: skip


def _form(needed: Mapping[str, Schema], more: Mapping[str, Schema] = {}) -> Schema:
    return {"type": "object", "properties": {**needed, **more}, "required": list(needed)}


def _admin(route: OperationRoute, summary: str) -> Endpoint:
    return Endpoint(
        summary=summary,
        tag="operations" if route in admin_operations.ROUTES else "weights",
        bodies=(route.body,),
        body_needed=route.body_needed,
        locked=True,
        refuses=OPENAI if route is weight_routes.FROM_TENSOR else (DETAIL,),
    )


_FACTS = Endpoint(summary="Model and server info, as in SGLang", tag=_INFO)
_LOAD = Endpoint(summary="The load of the server", tag=_INFO)
_STOP = Endpoint(summary="End a profiling run", tag="profiling", bodies=(StopBody,), locked=True)
_LISTENING = _form({"file": _FILE}, {"model": _TEXT, "response_format": _TEXT})

ENDPOINTS: Mapping[str, Endpoint] = {
    "health": Endpoint(summary="200 when all stages are ready, else 503", tag=_INFO),
    "models": Endpoint(summary="The model of this server", tag=_INFO),
    "model": Endpoint(summary="The model of that name, or 404", tag=_INFO, refuses=OPENAI),
    "get_model_info": _FACTS,
    "server_info": _FACTS,
    "get_server_info": _FACTS,
    "v1_loads": _LOAD,
    "get_loads": _LOAD,
    "get_load": _LOAD,
    "health_generate": Endpoint(summary="Generate a token: 200, or 503 with the reason", tag=_INFO,
                            response_types=(TEXT,)),
    "metrics": Endpoint(summary="Metrics for Prometheus", tag=_INFO, response_types=(TEXT,)),
    "flush_cache": Endpoint(summary="Flush the prefix cache", tag="operations", locked=True,
                        response_types=(TEXT,)),
    "model_info": Endpoint(summary="Model info of every stage", tag="operations", locked=True),
    "model_info_of": Endpoint(summary="Model info of some stages", tag="operations",
                          bodies=(OperationBody,), locked=True),
    "weights_checker_of_query": Endpoint(summary="Hash the weights", tag="weights", locked=True,
                                     query=("action",)),
    "get_weights_by_name": Endpoint(summary="The first rows of a tensor", tag="weights", locked=True,
                                bodies=(weight_routes.WeightsByName,), body_needed=False, refuses=OPENAI,
                                query=("name", "truncate_size")),
    "chat": Endpoint(summary="Chat completion, optionally streamed", tag=_CHAT, bodies=(ChatBody,),
                 response_types=(JSON, EVENTS)),
    "completions": Endpoint(summary="Text completion, optionally streamed", tag=_CHAT, refuses=OPENAI,
                        bodies=(CompletionBody,), response_types=(JSON, EVENTS)),
    "embeddings": Endpoint(summary="An embedding for each input", tag=_CHAT, bodies=(EmbeddingBody,),
                       refuses=OPENAI),
    "generate": Endpoint(summary="Generate, in the format of a rollout or of SGLang", tag=_CHAT,
                     bodies=(RolloutBody, SglangBody), response_types=(JSON, EVENTS)),
    "speech": Endpoint(summary="Synthesize speech, as a file or streamed", tag=_SOUND, body=_speech(),
                   refuses=OPENAI, response_types=("audio/wav", "audio/pcm", EVENTS)),
    "speech_outcome": Endpoint(summary="The outcome of a speech request", tag=_SOUND),
    "speech_batch": Endpoint(summary="Synthesize many texts", tag=_SOUND, body=_batch(), refuses=OPENAI),
    "voices": Endpoint(summary="List the voices", tag=_SOUND, refuses=OPENAI, query=("names_only",)),
    "voice_upload": Endpoint(
        summary="Upload a voice", tag=_SOUND, refuses=OPENAI, takes=FORM,
        body=_form({"audio_sample": _FILE, "name": _TEXT, "consent": _TEXT},
                   {"ref_text": _TEXT, "speaker_description": _TEXT}),
    ),
    "voice_delete": Endpoint(summary="Delete a voice", tag=_SOUND, refuses=("NoVoice", DETAIL)),
    "transcriptions": Endpoint(summary="Transcribe audio, optionally streamed", tag=_SOUND,
                           bodies=(TranscriptionFields,), body=_form({"file": _FILE}), takes=FORM,
                           response_types=(JSON, TEXT, EVENTS)),
    "translations": Endpoint(summary="Refused: no model translates", tag=_SOUND, refuses=OPENAI,
                         body=_LISTENING, takes=FORM),
    "diarizations": Endpoint(summary="Refused: no model identifies speakers", tag=_SOUND,
                         body=_LISTENING, takes=FORM),
    "start_profile": Endpoint(summary="Record a torch trace, and events", tag="profiling",
                          bodies=(StartBody,), locked=True),
    "start_request_profile": Endpoint(summary="Record events of requests", tag="profiling",
                                  bodies=(StartEventsBody,), locked=True),
    "stop_profile": _STOP,
    "stop_request_profile": _STOP,
    **{
        route.action: _admin(route, _OPERATIONS[route.action])
        for route in (*admin_operations.ROUTES, *weight_routes.ROUTES, weight_routes.FROM_TENSOR, weight_routes.SET_VERSION)
    },
}  # fmt: skip


def _operation(summary: str, *query: str) -> Endpoint:
    """A control route without a body."""
    return Endpoint(summary=summary, tag="vLLM", locked=True, refuses=OPENAI, query=query)


def _fact(summary: str, *query: str) -> Endpoint:
    return Endpoint(summary=summary, tag="vLLM", refuses=OPENAI, query=query)


def _weights(summary: str, *bodies: type) -> Endpoint:
    return Endpoint(
        summary=summary, tag="vLLM", bodies=bodies, locked=True, refuses=OPENAI,
        body_needed=bodies not in ((), (FinishUpdate,)),
    )  # fmt: skip


def _model(summary: str, *bodies: type, streams: bool = False) -> Endpoint:
    response_types = (JSON, EVENTS) if streams else (JSON,)
    return Endpoint(
        summary=summary, tag="text", bodies=bodies, response_types=response_types, refuses=OPENAI
    )


_NO_CACHE = Endpoint(
    summary="No operation: there is no such cache", tag="vLLM", locked=True, response_types=(TEXT,),
    refuses=OPENAI,
)  # fmt: skip
ENGINE_ENDPOINTS: Mapping[str, Endpoint] = {
    "abort_request": Endpoint(
        summary="Abort requests, as in SGLang", tag="operations",
        bodies=(AbortBody,), locked=True, response_types=(TEXT,),
    ),
    "pause": _operation("Hold all requests; keep, wait for or abort running ones", *_MODE),
    "resume": _operation("Continue after a pause"),
    "is_paused": _fact("Whether generation is paused"),
    "sleep": _operation("Pause, and drop the prefix cache", "level", "mode"),
    "wake_up": _operation("Continue after a sleep", "tags"),
    "is_sleeping": _fact("Whether the engine sleeps or is paused"),
    "abort_requests": Endpoint(
        summary="Abort requests by id, or all", tag="vLLM", body=_IDS,
        locked=True, refuses=OPENAI,
    ),
    "inference_v1_abort_requests": Endpoint(
        summary="Abort requests by id", tag="vLLM", body=_IDS, locked=True,
        response_types=(TEXT,), refuses=OPENAI,
    ),
    "reset_prefix_cache": _operation("Flush the prefix cache", "reset_running_requests"),
    "reset_mm_cache": _NO_CACHE,
    "reset_encoder_cache": _NO_CACHE,
    "collective_rpc": Endpoint(
        summary="reload_weights from kwargs.weights_path; no other method", tag="vLLM", body=_RPC,
        locked=True, refuses=OPENAI,
    ),
    "get_world_size": _fact("The number of ranks in a trainer's group", "include_dp"),
    "version": _fact("The version of this program"),
    "load": _fact("The number of requests"),
    "kv_event_sources": _fact("Where KV events are published, by rank"),
    "ping": Endpoint(summary="200 without a body", tag="vLLM", response_types=(TEXT,)),
    "init_weight_transfer_engine": _weights("Join a trainer's group", InitTransfer),
    "shutdown_weight_transfer_engine": _weights("Leave the trainer's group"),
    "start_weight_update": _weights("Begin to gather new weights"),
    "start_draft_weight_update": _weights("Refused: there is no draft model"),
    "update_weights": _weights("Receive the announced tensors over the group", UpdateWeights),
    "finish_weight_update": _weights("Swap in the gathered weights", FinishUpdate),
    "weight_checker": _weights("Hash, overwrite or compare the weights", CheckWeightsAgainst),
    "weight_info": _fact("The version of the weights"),
    "tokenize": _model("The tokens of a prompt or of a chat", TokenizeBody),
    "detokenize": _model("The text of tokens", DetokenizeBody),
    "v1_tokenize": _model("The tokens of prompts, in SGLang's format", PromptsBody),
    "v1_detokenize": _model("The text of tokens, in SGLang's format", TokenListsBody),
    "v1_chat_completions_render": _model("The tokens and sampling of a chat", ChatBody),
    "v1_completions_render": _model("The tokens and sampling of prompts", CompletionBody),
    "inference_v1_generate": _model("Generate from token ids, to token ids", TokensBody, streams=True),
    "v1_messages": _model("Chat in Anthropic's format", MessagesBody, streams=True),
    "v1_messages_count_tokens": _model("The number of tokens of such a chat", CountBody),
    "v1_responses": _model("OpenAI's Responses API", ResponsesBody, streams=True),
    "v1_response": _model("Get a stored response"),
    "v1_response_delete": _model("Delete a stored response"),
    "v1_response_cancel": _model("Cancel a background response"),
}  # fmt: skip
