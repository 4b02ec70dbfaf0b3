"""`response_format`: the JSON schema that the response must match, for the text stage.

Invariant: a format is either enforced or refused with 400 and the location of the error, before
anything is computed and before a stream's head is sent.
"""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from omni_proxy.replica.api.common.errors import DetailError
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.text.constraint import (
    ANY_OBJECT,
    ConstraintError,
    MissingLibraryError,
    check_schema,
)

FIELD = "response_format"
KINDS = ("text", "json_object", "json_schema")


async def response_schema(context: RouteContext, given: dict[str, Any] | None) -> str | None:
    """Return the schema of a `response_format` as text; None if the response is not constrained.

    Raises DetailError: 400 for what cannot be enforced, 501 if the package for it is missing.
    """
    schema = _schema(given or {"type": "text"})
    if schema is None:
        return None
    infos = context.client.stage_info().values()
    # A stage that is not ready has not reported its features: the request fails like any other.
    ready = context.client.health()["status"] == "healthy"
    if ready and not any(info.get("json_schemas") for info in infos):
        message = "no stage of this pipeline enforces a JSON schema; leave it out"
        raise DetailError(400, f"{FIELD}: {message}")
    try:
        # A large schema takes long to check: not on the event loop.
        await trio.to_thread.run_sync(check_schema, schema)
    except ConstraintError as error:
        raise DetailError(400, f"{FIELD}.json_schema.schema: {error}") from None
    except MissingLibraryError as error:
        raise DetailError(501, f"{FIELD}: {error}") from None
    return schema


def _schema(given: dict[str, Any]) -> str | None:
    kind = given.get("type")
    if kind not in KINDS:
        raise DetailError(400, f"{FIELD}.type must be one of {', '.join(KINDS)}, not {kind!r:.40}")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    named = given.get("json_schema")
    if not isinstance(named, dict):
        raise DetailError(400, f"{FIELD}.json_schema must be an object with a schema")
    if not isinstance(named.get("strict"), bool | None):
        raise DetailError(400, f"{FIELD}.json_schema.strict must be true, false or null")
    schema = named.get("schema")
    if not isinstance(schema, dict):
        raise DetailError(400, f"{FIELD}.json_schema.schema must be an object: a JSON schema")
    return msgspec.json.encode(schema).decode()
