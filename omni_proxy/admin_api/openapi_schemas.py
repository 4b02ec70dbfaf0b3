"""JSON Schemas of requests and responses, by the names that the OpenAPI document uses.

Invariant: a schema lists the keys that are always present; clients must accept further ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, get_args

from omni_proxy.admin_api.worker_requests import ROLE_KEYS, SMG_PATCH, SMG_PREFIXES, SMG_SPEC
from omni_proxy.api_keys.caller_limits import REASONS
from omni_proxy.config.fields import (
    CAPABILITIES,
    MAX_SECS,
    MAX_WEIGHT,
    Role,
)
from omni_proxy.fleet.health_state import Health
from omni_proxy.shared.engine_protocol import KvConnector
from omni_proxy.shared.origins import MAX_PORT
from omni_proxy.wire.bounded_json import MAX_INTEGER
from omni_proxy.wire.load_report import MAX_RANKS

Schema = dict[str, object]

ANY: Final[Schema] = {}
TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
NUMBER: Final[Schema] = {"type": "number"}
OBJECT: Final[Schema] = {"type": "object"}
TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
COUNT_OR_NULL: Final[Schema] = {"type": ["integer", "null"]}
OBJECT_OR_NULL: Final[Schema] = {"type": ["object", "null"]}
TIME: Final[Schema] = {"type": "string", "format": "date-time"}
COUNTS: Final[Schema] = {"type": "object", "additionalProperties": COUNT}
CAPABILITY: Final[Schema] = {"type": "string", "enum": list(CAPABILITIES)}

# Numbers of requests without a valid key.
_KEY_REFUSALS: Final[dict[str, Schema]] = {
    "refused_without_key": COUNT, "refused_without_key_last_minute": COUNT,
}  # fmt: skip


def or_auto(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"const": "auto"}]}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def shape(optional: Iterable[str] = (), /, **properties: Schema) -> Schema:
    """An object with all of `properties` except the optional ones."""
    left_out = frozenset(optional)
    required = [name for name in properties if name not in left_out]
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


def body(min_properties: int = 0, /, **properties: Schema) -> Schema:
    """A request's object: every key is optional, and no other is accepted."""
    schema = {**shape(properties, **properties), "additionalProperties": False}
    return {**schema, "minProperties": min_properties} if min_properties else schema


ROLE: Final[Schema] = {"type": "string", "enum": list(get_args(Role))}
KV_CONNECTOR: Final[Schema] = {"type": "string", "enum": list(get_args(KvConnector))}
RANK_COUNTS: Final = (
    "rank", "in_flight", "peak_in_flight", "max_inflight", "routed_requests",
    "successful_requests", "failed_requests", "sessions",
)  # fmt: skip

_NUMBER_OR_NULL: Final[Schema] = {"type": ["number", "null"]}
ENGINE_LOAD: Final[Schema] = {
    "anyOf": [
        shape(
            waiting=_NUMBER_OR_NULL,
            kv_usage=_NUMBER_OR_NULL,
            age_secs=NUMBER,
            state={"type": "string", "enum": ["ok", "overloaded", "stale"]},
        ),
        {"type": "null"},
    ]
}


def _worker() -> Schema:
    texts = ("worker_id", "id", "display_id", "url", "worker_type", "connection_mode", "origin")
    flags = ("disabled", "routable", "half_open", "trial", "is_healthy")
    counts = (
        "active_requests", "consecutive_failures", "consecutive_successes", "routed_requests",
        "successful_requests", "failed_requests", "weight", "max_inflight", "in_flight",
        "peak_in_flight", "weight_epoch", "load", "sessions", "priority",
    )  # fmt: skip
    by_class = (f"{kind}_requests_by_class" for kind in ("routed", "successful", "failed"))
    return shape(
        ("job_status",),
        **dict.fromkeys(texts, TEXT),
        **dict.fromkeys(flags, FLAG),
        **dict.fromkeys(counts, COUNT),
        **dict.fromkeys(by_class, COUNTS),
        **dict.fromkeys(("model", "model_id", "last_error", "weight_version", "why"), TEXT_OR_NULL),
        capabilities=listed(CAPABILITY),
        health_state={"type": "string", "enum": [state.value for state in Health]},
        status={"type": "string", "enum": ["pending", "ready", "not_ready", "failed"]},
        last_status_code=COUNT_OR_NULL,
        last_checked_at={"type": ["string", "null"], "format": "date-time"},
        since=TIME,
        registered_at=TIME,
        held_by=listed(TEXT),
        health=ANY,
        draining=OBJECT_OR_NULL,
        paused=OBJECT_OR_NULL,
        disabled_by={"anyOf": [shape(by=TEXT_OR_NULL, at=TEXT_OR_NULL), {"type": "null"}]},
        prefix_cache=OBJECT_OR_NULL,
        discovered=OBJECT_OR_NULL,
        cost=NUMBER,
        labels=OBJECT,
        role=ROLE,
        kv_connector={"anyOf": [KV_CONNECTOR, {"type": "null"}]},
        bootstrap_port=COUNT_OR_NULL,
        loras=ANY,
        kv_mode=TEXT,
        kv_reason=TEXT,
        adapters=listed(TEXT),
        configured_ranks=ANY,
        engine_load=ENGINE_LOAD,
        ranks=listed(shape(**dict.fromkeys(RANK_COUNTS, COUNT), engine_load=ENGINE_LOAD)),
        job_status=shape(
            **dict.fromkeys(("job_type", "worker_url", "status", "message"), TEXT), timestamp=TIME
        ),
    )


COUNTED: Final = dict.fromkeys(
    (
        "healthy_workers", "dead_workers", "disabled_workers", "routable_workers",
        "unhealthy_workers", "unknown_workers", "total_workers",
    ),
    COUNT,
)  # fmt: skip


def _pool() -> Schema:
    schema = shape(
        ("reason", "workers", "admission", "voice_routing"),
        status=TEXT,
        reason=TEXT,
        **COUNTED,
        workers=listed(ref("Worker")),
        admission=OBJECT,
        voice_routing=OBJECT,
    )
    return {
        **schema,
        "description": "If a key is set, a response to a request without it has no workers.",
    }


def _error() -> Schema:
    code: Schema = {"type": ["string", "integer"]}
    return shape(
        ("detail", "code", "details", "success", "message", "status"),
        error=shape(("reason",), message=TEXT, type=TEXT, code=code, reason=TEXT),
        detail=ANY,
        code=TEXT,
        details=OBJECT,
        success=FLAG,
        message=TEXT,
        status=TEXT,
    )


_HTTP: Final[Schema] = {"type": "string", "enum": ["http", "HTTP"]}
_REMARKS: Final[dict[str, Schema]] = {
    **dict.fromkeys(sorted(SMG_PATCH), ANY),
    "priority": COUNT,
    "cost": {"type": "number", "minimum": 0},
    "labels": OBJECT,
}
_SPEC: Final[dict[str, Schema]] = {
    **dict.fromkeys(sorted(SMG_SPEC), ANY),
    **_REMARKS,
    "model": TEXT_OR_NULL,
    "model_id": TEXT_OR_NULL,
    "models": listed(OBJECT),
    "capabilities": {**listed(CAPABILITY), "minItems": 1},
    "worker_type": ROLE,
    "role": ROLE,
    "kv_connector": {"anyOf": [KV_CONNECTOR, {"type": "null"}]},
    "bootstrap_port": {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_PORT},
    "connection_mode": _HTTP,
    "url": TEXT,
}
_BALANCE: Final[dict[str, Schema]] = {
    "weight": {"type": "integer", "minimum": 1, "maximum": MAX_WEIGHT},
    "max_inflight": {**COUNT, "maximum": MAX_INTEGER},
}
_SOME: Final[Schema] = {"type": "array", "minItems": 1}
_BEGINNINGS: Final = {"patternProperties": {f"^({'|'.join(SMG_PREFIXES)})": ANY}}
_PART: Final = shape(
    ("status_code", "body", "error", "reason", "standing"),
    worker=TEXT,
    success=FLAG,
    status_code=COUNT,
    body=ANY,
    error=TEXT,
    reason=ANY,
    seconds=NUMBER,
    standing=TEXT,
)
_RESULT: Final = shape(
    worker_id=TEXT, url=TEXT, status=COUNT_OR_NULL, latency_ms={"type": ["number", "null"]},
    body=ANY,
)  # fmt: skip
_RL_WORKER: Final = shape(
    **dict.fromkeys(
        (
            "id", "url", "base_url", "worker_type", "connection_mode", "control_url", "role",
            "health",
        ),
        TEXT,
    ),
    **dict.fromkeys(("engine", "engine_version", "model_id", "weight_version"), TEXT_OR_NULL),
    **dict.fromkeys(("tp_size", "dp_size", "pp_size"), COUNT_OR_NULL),
    labels=OBJECT,
    capabilities=OBJECT,
)  # fmt: skip
_ROLLOUT: Final = shape(
    (
        "weight_version", "model_path", "version", "model", "caller", "begun_at", "ended_at",
        "max_unavailable", "canary", "cause", "waits_for", "weight_epoch", "updated", "total",
    ),
    id=TEXT_OR_NULL, state=TEXT, weight_version=TEXT, model_path=TEXT_OR_NULL,
    version=COUNT_OR_NULL, model=TEXT_OR_NULL, caller=TEXT, begun_at=TEXT, ended_at=TEXT_OR_NULL,
    max_unavailable=COUNT, canary=COUNT, cause=TEXT_OR_NULL, waits_for=TEXT_OR_NULL,
    weight_epoch=COUNT_OR_NULL, updated=COUNT, total=COUNT, workers=listed(OBJECT),
)  # fmt: skip
_OUTCOME: Final = shape(
    ("path", "worker_count", "results", "error"),
    success=FLAG,
    message=TEXT,
    status=TEXT,
    path=TEXT,
    worker_count=COUNT,
    results=listed(_PART),
    error={"type": "object", "properties": {"message": TEXT}, "required": ["message"]},
)

_SERIES: Final[Schema] = {
    "type": "object",
    "additionalProperties": listed(_NUMBER_OR_NULL),
    "description": "Values by the name of the series, oldest first; null if unknown.",
}

SCHEMAS: Final[dict[str, Schema]] = {
    "Error": _error(),
    "Worker": _worker(),
    "Pool": _pool(),
    "Alive": shape(status={"const": "alive"}),
    "Selection": {
        **shape(
            ("selection_id", "lease_secs", "path", "session_id", "model_name", "headers",
             "request"),
            selection_id={"type": "string", "maxLength": 256},
            lease_secs={"type": "number", "exclusiveMinimum": 0, "maximum": 86400},
            path=TEXT, session_id=TEXT, model_name=TEXT,
            headers={"type": "object", "additionalProperties": TEXT}, request=OBJECT,
        ),
        "description": "Other keys are those of the model request, unless `request` has it.",
    },
    "Selected": shape(
        reservation_id=TEXT_OR_NULL, worker_id=TEXT, endpoint=TEXT, url=TEXT,
        rank={"type": ["integer", "null"]}, model=TEXT_OR_NULL, lease_secs=_NUMBER_OR_NULL,
    ),
    "Released": shape(reservation_id=TEXT, released=FLAG),
    "FinishedSession": shape(session_id=TEXT, finished=FLAG),
    "Keys": shape(
        keys=listed(shape(
            name=TEXT, models=listed(TEXT), max_inflight=COUNT, requests_per_minute=COUNT,
            tokens_per_minute=COUNT, priority={"type": "integer"}, in_flight=COUNT, requests=COUNT,
            input_tokens=COUNT, output_tokens=COUNT, origin={"enum": ["file", "api"]},
            refused=shape(**dict.fromkeys(REASONS, COUNT)),
        )),
        **_KEY_REFUSALS, error=TEXT_OR_NULL,
    ),
    "KeyChanged": shape(status=TEXT, name=TEXT, key_required=FLAG),
    "Status": shape(
        version=TEXT, pid=COUNT, started_at=TIME, uptime_secs=NUMBER, listeners=listed(TEXT),
        build=TEXT, revision=COUNT, config_file=TEXT_OR_NULL, state_file=TEXT_OR_NULL,
        state_error=TEXT_OR_NULL, last_reload=OBJECT, supervisors=listed(OBJECT),
        watchdog=OBJECT, data_plane=OBJECT, door=OBJECT, fleet=shape(**COUNTED),
        launch=listed(OBJECT), **_KEY_REFUSALS, kv_modes=OBJECT,
        discovery=listed(OBJECT), cluster=OBJECT_OR_NULL, picker=OBJECT_OR_NULL,
    ),
    "Workers": {
        "allOf": [
            ref("Pool"),
            shape(
                workers=listed(ref("Worker")),
                total=COUNT,
                stats=shape(prefill_count=COUNT, decode_count=COUNT, regular_count=COUNT),
            ),
        ]
    },
    "NewKey": {
        **body(
            name={"type": "string", "pattern": "^[A-Za-z0-9_.:@/-]{1,64}$"},
            key_sha256={"type": "string", "pattern": "^[0-9a-f]{64}$"},
            models=listed({"type": "string", "minLength": 1}),
            max_inflight={**COUNT, "maximum": MAX_INTEGER},
            requests_per_minute={**COUNT, "maximum": MAX_INTEGER},
            tokens_per_minute={**COUNT, "maximum": MAX_INTEGER},
            priority={"type": "integer", "minimum": -1000, "maximum": 1000},
        ),
        "required": ["name", "key_sha256"],
    },
    "NewWorker": {
        **body(
            **_SPEC,
            **_BALANCE,
            worker_url=TEXT,
            ranks=or_auto({"type": "integer", "minimum": 1, "maximum": MAX_RANKS}),
            loras=or_auto(listed({"type": "string", "minLength": 1})),
            kv_events=TEXT,
            kv_replay=TEXT,
        ),
        **_BEGINNINGS,
    },
    "Switches": {
        **body(1, **_SPEC, **_BALANCE, disabled=FLAG, is_dead=FLAG),
        **_BEGINNINGS,
        "description": "A `url` must be the worker's own.",
    },
    "Remarks": body(1, **_REMARKS, **{name: _SPEC[name] for name in sorted(ROLE_KEYS)}),
    "Changed": shape(status=TEXT, worker=ref("Worker")),
    "Accepted": shape(
        ("ignored",), status={"const": "accepted"}, worker_id=TEXT, url=TEXT, location=TEXT,
        message=TEXT, ignored=listed(TEXT),
    ),
    "Deleted": shape(
        ("drained", "process"),
        status={"const": "ok"},
        worker_id=TEXT,
        drained=FLAG,
        process={"const": "stops"},
    ),
    "Deadline": shape(
        ("timeout_secs",), timeout_secs={"type": "number", "minimum": 0, "maximum": MAX_SECS}
    ),
    "Received": {
        **shape(**dict.fromkeys(("names", "dtypes", "shapes"), _SOME)),
        "description": "Lists of the same length; keys are forwarded to the workers unchanged.",
    },
    "Urls": shape(urls=listed(TEXT)),
    "Models": shape(object={"const": "list"}, data=listed(OBJECT)),
    "Generated": shape(status={"const": "ok"}, worker=TEXT),
    "Loads": shape(
        timestamp=TIME, version=TEXT, dp_rank_count=COUNT, loads=listed(OBJECT), aggregate=OBJECT,
        workers=listed(shape(worker=TEXT, load={"type": "integer", "minimum": -1})),
    ),
    "Flushed": shape(
        ("success",), status={"type": "string", "enum": ["success", "partial", "failed"]},
        message=TEXT, workers_flushed=COUNT, total_http_workers=COUNT, total_grpc_workers=COUNT,
        total_zmq_workers_skipped=COUNT, total_workers=COUNT,
        failed={"type": "object", "additionalProperties": TEXT}, success=FLAG,
    ),
    "Explained": shape(
        ("refusal",),
        need=shape(model=TEXT_OR_NULL, stream=FLAG, capabilities=listed(CAPABILITY),
                   weights=TEXT_OR_NULL),
        policy=TEXT,
        workers=listed(
            shape(worker_id=TEXT, url=TEXT, eligible=FLAG, reasons=listed(TEXT), in_flight=COUNT,
                  health_state=TEXT, weight_version=TEXT_OR_NULL, weight_epoch=COUNT)
        ),
        pick=OBJECT_OR_NULL,
        refusal=shape(status=COUNT, message=TEXT, code=TEXT),
    ),
    "PastCandidates": shape(
        request_id=TEXT, policy=TEXT, worker=TEXT_OR_NULL, reason=TEXT_OR_NULL, total=COUNT,
        workers=listed(shape(url=TEXT, eligible=FLAG, reasons=listed(TEXT), in_flight=COUNT)),
    ),
    "Configuration": shape(
        ("error",), revision=COUNT, config=OBJECT, last_reload=OBJECT, error=ANY
    ),
    "Reloaded": shape(outcome=TEXT, revision=COUNT, diff=OBJECT),
    "Snapshot": shape(
        history=listed(OBJECT), at=TIME, version=TEXT, ready=FLAG, leaving=FLAG, revision=COUNT,
        admission=OBJECT, data_plane=OBJECT, door=OBJECT, policy=OBJECT, fleet=listed(OBJECT),
        last_minute=OBJECT, recent_ends=listed(OBJECT), last_reload=OBJECT,
        supervisors=listed(OBJECT),
        watchdog=OBJECT, weights=OBJECT, keys=listed(OBJECT), key_required=FLAG,
        usage_metrics=FLAG,
        reader=shape(name=TEXT_OR_NULL, role=TEXT), discovery=listed(OBJECT),
        cluster=OBJECT_OR_NULL, **_KEY_REFUSALS,
    ),
    "Outcome": {**_OUTCOME, "description": "The result of a weight route, refusals included."},
    "Weights": shape(
        operation=OBJECT_OR_NULL, rollout=OBJECT_OR_NULL, store=OBJECT, waiting=listed(OBJECT),
        weight_epoch=COUNT, weight_version=TEXT_OR_NULL, workers=listed(OBJECT), uncertain=OBJECT,
        journal=OBJECT, history=listed(OBJECT),
    ),
    "Rollout": _ROLLOUT,
    "RolloutEvents": TEXT,
    "RolloutOutcome": shape(success=FLAG, message=TEXT, status=TEXT, rollout=_ROLLOUT),
    "RolloutOrder": body(
        model_path=TEXT, version={"type": ["integer", "string"]}, weight_version=TEXT,
        max_unavailable={"type": ["integer", "string"]}, canary=COUNT, pause_after_canary=FLAG,
        drain_secs={"type": "number", "minimum": 0}, load_format=TEXT,
    ),
    "Versions": shape(
        store=TEXT_OR_NULL, versions=listed(OBJECT), current={"type": ["integer", "null"]},
        error=TEXT_OR_NULL, caught_up=COUNT, not_caught_up=COUNT,
    ),
    "Acknowledgement": shape(acknowledge={"const": True}),
    "RlWorker": _RL_WORKER,
    "RlWorkers": shape(protocol_version=COUNT, workers=listed(ref("RlWorker"))),
    "RlResult": _RESULT,
    "RlResults": shape(
        results={"type": "object", "additionalProperties": _RESULT}, failed=listed(OBJECT),
        total=COUNT, succeeded=COUNT,
    ),
    "History": {
        **shape(
            ("worker", "series", "workers"), secs=COUNT, step_secs=COUNT, metrics=FLAG,
            worker=TEXT, series=_SERIES,
            workers=listed(shape(id=TEXT, url=TEXT, series=_SERIES)), **{"from": COUNT},
        ),
        "description": "`from`: Unix time of the first value.",
    },
    "Anything": ANY,
    "Fields": OBJECT,
}  # fmt: skip
