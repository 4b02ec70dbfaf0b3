"""The app: every route over one live client, and what holds for all of them.

Invariant: making it starts nothing: no pipeline, no server, no profiler. It ends with the server
that serves it; the client is its owner's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from quart_trio import QuartTrio

from omni_proxy.replica.api import (
    admin,
    batch,
    chat,
    completions,
    cors,
    embeddings,
    errors,
    generate,
    health,
    info,
    metrics,
    openapi,
    speech,
    speech_socket,
    strangers,
    top_keys,
    transcriptions,
    voices,
    weights,
)
from omni_proxy.replica.api.served import Options, Served

if TYPE_CHECKING:
    from omni_proxy.replica.pipeline.client import Client

ROUTES = (
    health,
    info,
    metrics,
    admin,
    weights,
    top_keys,
    chat,
    completions,
    embeddings,
    generate,
    speech,
    speech_socket,
    batch,
    voices,
    transcriptions,
    openapi,
)
BODY_SECS = 600


def create_app(client: Client, **options: Unpack[Options]) -> QuartTrio:
    """`options` are the fields of `Served`: model_name, admin_api_key, stream_speech_as, ..."""
    return app_of(Served(client=client, **options))


def app_of(served: Served) -> QuartTrio:
    app = QuartTrio("sglang-omni", static_folder=None)
    app.config["RESPONSE_TIMEOUT"] = None  # Quart's 60 s end a long answer without a word
    app.config["BODY_TIMEOUT"] = BODY_SECS
    app.config["MAX_CONTENT_LENGTH"] = served.max_body_bytes
    app.config["MAX_FORM_MEMORY_SIZE"] = served.max_body_bytes
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    errors.speak(app)
    cors.open_to_all(app)
    strangers.keep_out(app, served)
    for routes in ROUTES:
        routes.mount(app, served)
    return app
