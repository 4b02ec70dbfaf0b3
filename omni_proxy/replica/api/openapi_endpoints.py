"""The endpoints of the OpenAPI document: purpose, bodies, responses and error formats.

Invariant: bodies are the Structs that the routes validate, and hand-checked fields are those of the
table that checks them, so that the document cannot differ from the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from omni_proxy.replica.api.native import admin_operations, weight_routes
from omni_proxy.replica.api.native.admin_operations import OperationBody, OperationRoute
from omni_proxy.replica.api.native.generate import AbortBody, NativeBody, RolloutBody
from omni_proxy.replica.api.openai.chat import ChatBody
from omni_proxy.replica.api.openai.completions import CompletionBody
from omni_proxy.replica.api.openai.embeddings import EmbeddingBody
from omni_proxy.replica.api.openai.transcriptions import TranscriptionFields
from omni_proxy.replica.api.speech.speech_fields import FIELD_TYPES
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
from omni_proxy.replica.profiling.profile_routes import StartBody, StartEventsBody, StopBody

JSON, FORM, TEXT = "application/json", "multipart/form-data", "text/plain"
EVENTS = "text/event-stream"
DETAIL = "Detail"
OPENAI = ("OpenAIError", DETAIL)
Schema = dict[str, Any]

# Schema of a hand-checked field, by the description in its error message.
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
    "pause_generation": "Compute nothing until it goes on",
    "continue_generation": "Go on after a pause",
    "update_weights_from_disk": "Read new weights from a disk and put them in place",
    "read_weights_ahead": "Read a file of weights while it is being written",
    "init_weights_update_group": "Join a trainer's group",
    "destroy_weights_update_group": "Leave a trainer's group",
    "update_weights_from_distributed": "Receive new weights over a group and put them in place",
    "prepare_weights_update": "Be ready to receive new weights over a group",
    "complete_weights_update": "Put in place what was received",
    "begin_weight_update": "Gather updates from now on",
    "end_weight_update": "Put in place what was gathered",
    "weights_checker": "Hash, keep or compare the weights",
    "update_weights_from_tensor": "Take new weights out of the body; 501 unless that is enabled",
    "update_weight_version": "Name the version of the weights",
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
    """One endpoint. `bodies`: any of these; or `body`: a schema, of the media type `takes`.

    `answers` are media types. `refuses` are the error formats; any route may answer 405 and 413
    with a `Detail`. `locked` needs the admin key, if one is set. `query` are query parameters.
    """

    summary: str
    tag: str
    bodies: tuple[type[Struct], ...] = ()
    body: Schema | None = None
    takes: str = JSON
    body_needed: bool = True
    answers: tuple[str, ...] = (JSON,)
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


_FACTS = Endpoint(summary="What runs here, as SGLang's servers tell it", tag=_INFO)
_LOAD = Endpoint(summary="How busy it is", tag=_INFO)
_STOP = Endpoint(summary="End a profiling run", tag="profiling", bodies=(StopBody,), locked=True)
_LISTENING = _form({"file": _FILE}, {"model": _TEXT, "response_format": _TEXT})

ENDPOINTS: Mapping[str, Endpoint] = {
    "health": Endpoint(summary="200 when all stages are ready, else 503", tag=_INFO),
    "models": Endpoint(summary="The one model", tag=_INFO),
    "model": Endpoint(summary="The model of that name, or 404", tag=_INFO, refuses=OPENAI),
    "get_model_info": _FACTS,
    "server_info": _FACTS,
    "get_server_info": _FACTS,
    "v1_loads": _LOAD,
    "get_loads": _LOAD,
    "get_load": _LOAD,
    "health_generate": Endpoint(summary="Generate a token: 200, or 503 that says why not", tag=_INFO,
                            answers=(TEXT,)),
    "metrics": Endpoint(summary="Metrics for Prometheus", tag=_INFO, answers=(TEXT,)),
    "flush_cache": Endpoint(summary="Empty the prefix cache", tag="operations", locked=True,
                        answers=(TEXT,)),
    "model_info": Endpoint(summary="What every stage says of its model", tag="operations", locked=True),
    "model_info_of": Endpoint(summary="What some stages say of their model", tag="operations",
                          bodies=(OperationBody,), locked=True),
    "weights_checker_of_query": Endpoint(summary="Hash the weights", tag="weights", locked=True,
                                     query=("action",)),
    "get_weights_by_name": Endpoint(summary="The first rows of a tensor", tag="weights", locked=True,
                                bodies=(weight_routes.WeightsByName,), body_needed=False, refuses=OPENAI,
                                query=("name", "truncate_size")),
    "chat": Endpoint(summary="Answer a chat, whole or streamed", tag=_CHAT, bodies=(ChatBody,),
                 answers=(JSON, EVENTS)),
    "completions": Endpoint(summary="Continue prompts, whole or streamed", tag=_CHAT, refuses=OPENAI,
                        bodies=(CompletionBody,), answers=(JSON, EVENTS)),
    "embeddings": Endpoint(summary="A vector for each input", tag=_CHAT, bodies=(EmbeddingBody,),
                       refuses=OPENAI),
    "generate": Endpoint(summary="Continue a prompt in a trainer's words, or in SGLang's", tag=_CHAT,
                     bodies=(RolloutBody, NativeBody), answers=(JSON, EVENTS)),
    "speech": Endpoint(summary="Speak a text, as a file or streamed", tag=_SOUND, body=_speech(),
                   refuses=OPENAI, answers=("audio/wav", "audio/pcm", EVENTS)),
    "speech_outcome": Endpoint(summary="How a speech request ended", tag=_SOUND),
    "speech_batch": Endpoint(summary="Speak many texts", tag=_SOUND, body=_batch(), refuses=OPENAI),
    "voices": Endpoint(summary="The voices", tag=_SOUND, refuses=OPENAI, query=("names_only",)),
    "voice_upload": Endpoint(
        summary="Keep a voice", tag=_SOUND, refuses=OPENAI, takes=FORM,
        body=_form({"audio_sample": _FILE, "name": _TEXT, "consent": _TEXT},
                   {"ref_text": _TEXT, "speaker_description": _TEXT}),
    ),
    "voice_delete": Endpoint(summary="Forget a voice", tag=_SOUND, refuses=("NoVoice", DETAIL)),
    "transcriptions": Endpoint(summary="Write down what is spoken, whole or streamed", tag=_SOUND,
                           bodies=(TranscriptionFields,), body=_form({"file": _FILE}), takes=FORM,
                           answers=(JSON, TEXT, EVENTS)),
    "translations": Endpoint(summary="Refused: no model here translates", tag=_SOUND, refuses=OPENAI,
                         body=_LISTENING, takes=FORM),
    "diarizations": Endpoint(summary="Refused: no model here tells speakers apart", tag=_SOUND,
                         body=_LISTENING, takes=FORM),
    "start_profile": Endpoint(summary="Record torch's trace, and events", tag="profiling",
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
    answers = (JSON, EVENTS) if streams else (JSON,)
    return Endpoint(summary=summary, tag="text", bodies=bodies, answers=answers, refuses=OPENAI)


_NO_CACHE = Endpoint(
    summary="Nothing: there is no such cache", tag="vLLM", locked=True, answers=(TEXT,),
    refuses=OPENAI,
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
        locked=True, refuses=OPENAI,
    ),
    "inference_v1_abort_requests": Endpoint(
        summary="End requests with what they have", tag="vLLM", body=_IDS, locked=True,
        answers=(TEXT,), refuses=OPENAI,
    ),
    "reset_prefix_cache": _operation("Empty the prefix cache", "reset_running_requests"),
    "reset_mm_cache": _NO_CACHE,
    "reset_encoder_cache": _NO_CACHE,
    "collective_rpc": Endpoint(
        summary="reload_weights from kwargs.weights_path; no other method", tag="vLLM", body=_RPC,
        locked=True, refuses=OPENAI,
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
