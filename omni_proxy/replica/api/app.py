"""The app: every route over one pipeline client, and the settings of all routes.

Invariant: creating the app doesn't start a pipeline, server or profiler. It lives as long as the
server that serves it; the caller owns the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from quart_trio import QuartTrio

from omni_proxy.replica.api import metrics, openapi_document
from omni_proxy.replica.api.common import cross_origin, errors
from omni_proxy.replica.api.openai import chat, completions, embeddings, transcriptions
from omni_proxy.replica.api.route_context import AppOptions, RouteContext
from omni_proxy.replica.api.sglang import (
    admin_operations,
    generate,
    server_info,
    weight_routes,
)
from omni_proxy.replica.api.speech import speech_routes, speech_socket, voices
from omni_proxy.replica.api.vllm import (
    anthropic_messages,
    control_routes,
    responses,
    token_generation,
    tokenize_routes,
    weight_transfer_routes,
)
from omni_proxy.replica.api.vllm.control_routes import EngineCalls
from omni_proxy.replica.api.vllm.tokenize_routes import PromptTokens
from omni_proxy.shared.asgi.url_rules import match_only

if TYPE_CHECKING:
    from omni_proxy.replica.pipeline.client import Client

ROUTES = (
    server_info,
    metrics,
    chat,
    completions,
    embeddings,
    speech_routes,
    speech_socket,
    voices,
    transcriptions,
    openapi_document,
)
SGLANG_ROUTES = (admin_operations, weight_routes, generate)
BODY_TIMEOUT_SECS = 600


def create_app(client: Client, **options: Unpack[AppOptions]) -> QuartTrio:
    """`options` are the fields of `RouteContext`, such as model_name and admin_api_key."""
    return build_app(RouteContext(client=client, **options))


def build_app(context: RouteContext) -> QuartTrio:
    app = QuartTrio("sglang-omni", static_folder=None)
    match_only(app)
    app.config["RESPONSE_TIMEOUT"] = (
        None  # Quart's default of 60 s would silently cut long responses
    )
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT_SECS
    app.config["MAX_CONTENT_LENGTH"] = context.max_body_bytes
    app.config["MAX_FORM_MEMORY_SIZE"] = context.max_body_bytes
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    errors.register_error_handlers(app)
    cross_origin.add_cors_headers(app)
    cross_origin.refuse_cross_origin(app, context)
    for routes in ROUTES:
        routes.mount(app, context)
    tokens = PromptTokens(context.tokenizer_model)
    tokenize_routes.mount(app, context, tokens, as_vllm=context.dialect != "sglang")
    anthropic_messages.mount(app, context, tokens)
    responses.mount(app, context)
    if context.dialect != "vllm":
        for routes in SGLANG_ROUTES:
            routes.mount(app, context)
    if context.dialect != "sglang":
        engine = EngineCalls(context)
        control_routes.mount(app, context, engine)
        weight_transfer_routes.mount(app, context, engine, alone=context.dialect == "vllm")
        token_generation.mount(app, context)
        metrics.add_load_header(app, context)
    return app
