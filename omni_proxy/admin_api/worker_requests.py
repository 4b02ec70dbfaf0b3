"""Bodies of worker requests in two dialects, and notes that clients attach to a worker.

Requests of the proxy's own dialect are answered when the change is done, those of sgl-model-gateway
(smg) immediately: a key that only smg has makes a request asynchronous, like the configured dialect
or the `Prefer` header. Labels, priority and cost are stored and shown, but do not affect routing.
Invariant: a body is validated whole before anything changes, and an unknown key is refused
(note:omni-router 5, note:routers 1.7); notes live as long as their worker object and are never
saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import get_args

from omni_proxy.admin_api.fleet_changes import gateway_id
from omni_proxy.config.fields import (
    CAPABILITIES,
    MAX_WEIGHT,
    Role,
    read_kv_events,
    read_kv_replay,
)
from omni_proxy.config.url import normalize_url
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.shared.engine_protocol import KvConnector
from omni_proxy.shared.origins import MAX_PORT
from omni_proxy.wire.bounded_json import MAX_INTEGER
from omni_proxy.wire.errors import bad_request
from omni_proxy.wire.load_report import MAX_RANKS

# The role of a worker, and the settings that its partner needs.
ROLE_KEYS = frozenset(("role", "kv_connector", "bootstrap_port"))
BALANCE_KEYS = frozenset(("weight", "max_inflight"))
OMNI_ADD = (
    frozenset(
        ("url", "worker_url", "model", "capabilities", "ranks", "loras", "kv_events", "kv_replay")
    )
    | ROLE_KEYS
    | BALANCE_KEYS
)
OMNI_SWITCH = frozenset(("disabled", "is_dead", "capabilities", "model")) | ROLE_KEYS | BALANCE_KEYS
SMG_PATCH = frozenset(("priority", "cost", "labels", "api_key", "health"))
SMG_SPEC = SMG_PATCH | {
    "bootstrap_host", "chat_template", "connection_mode", "disable_health_check",
    "http_pool", "load_monitor_interval_secs", "max_connection_attempts", "metadata", "model_id",
    "models", "provider", "reasoning_parser", "resilience", "runtime_type", "tokenizer_path",
    "tool_parser", "worker_type",
}  # fmt: skip
SMG_PREFIXES = ("dp_", "kv_")
# The keys of smg that are applied or stored; the response lists the others as ignored.
HONOURED = frozenset(
    ("priority", "cost", "labels", "model_id", "models", "worker_type", "connection_mode")
)


@dataclass(frozen=True, slots=True)
class WorkerBody:
    """A validated body. `settings` has, if given, model ("" = none), capabilities, disabled,
    role, kv_connector, bootstrap_port (0 = unknown), ranks, loras, kv_events, kv_replay, weight and
    max_inflight (0 = no bound)."""

    settings: dict[str, object]
    is_dead: bool | None
    note_fields: dict[str, object]
    ignored: list[str]
    in_background: bool


def parse_add(body: Mapping[str, object], *, prefers_async: bool) -> WorkerBody:
    """Validate a POST; the caller validates the URL, which may be in the query."""
    return _parse(body, OMNI_ADD, SMG_SPEC, prefers_async=prefers_async)


def parse_put(body: Mapping[str, object], url: str | None, *, prefers_async: bool) -> WorkerBody:
    """Validate a PUT; smg sends the whole spec, whose url must be that of the worker (None:
    unknown)."""
    parsed = _parse(body, OMNI_SWITCH, SMG_SPEC | {"url"}, prefers_async=prefers_async)
    if url is not None and "url" in body and _normalized(body["url"]) != url:
        raise bad_request("url must stay the same; add a worker for another url")
    return parsed


def _normalized(url: object) -> object:
    """A valid URL normalized, anything else unchanged."""
    try:
        return normalize_url(url, allow_unix=True) if isinstance(url, str) else url
    except ValueError:
        return url


def parse_patch(body: Mapping[str, object]) -> WorkerBody:
    return _parse(body, ROLE_KEYS, SMG_PATCH, prefers_async=True)


def _parse(
    body: Mapping[str, object],
    omni: frozenset[str],
    smg: frozenset[str],
    *,
    prefers_async: bool,
) -> WorkerBody:
    spec = {key for key in body if key not in omni and _is_smg(key, smg)}
    in_background = prefers_async or bool(spec - {"url"})  # a url alone does not imply smg
    unknown = sorted(body.keys() - omni - spec)
    if unknown:
        raise bad_request(f"unsupported fields: {', '.join(unknown)}", "unsupported_fields")
    if not body and omni is not OMNI_ADD:
        raise bad_request("at least one worker field is required")
    flags = {name: _boolean(body, name) for name in ("is_dead", "disabled")}
    settings: dict[str, object] = {}
    if flags["disabled"] is not None:
        settings["disabled"] = flags["disabled"]
    if "capabilities" in body:
        settings["capabilities"] = _capabilities(body["capabilities"])
    model = _model(body)
    if model is not None:
        settings["model"] = model
    settings.update(_role_settings(body))
    settings.update(_balance_settings(body))
    return WorkerBody(
        settings, flags["is_dead"], _remarks(body), sorted(spec - HONOURED - {"url"}), in_background
    )


def _is_smg(key: str, smg: frozenset[str]) -> bool:
    return key in smg or (smg is not SMG_PATCH and key.startswith(SMG_PREFIXES))


def _boolean(body: Mapping[str, object], name: str) -> bool | None:
    value = body.get(name)
    if name in body and not isinstance(value, bool):
        raise bad_request(f"{name} must be a boolean")
    return value if isinstance(value, bool) else None


def _capabilities(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise bad_request("capabilities must be a non-empty list of names")
    unknown = [name for name in value if name not in CAPABILITIES]
    if unknown:
        raise bad_request(f"unknown capability {unknown[0]!r}; known are {', '.join(CAPABILITIES)}")
    return tuple(name for name in CAPABILITIES if name in value)


def _model(body: Mapping[str, object]) -> str | None:
    """The model in the body ("" = cleared), None without one."""
    if "model" in body:
        model = body["model"]
    elif "model_id" in body:
        model = body["model_id"]
    elif isinstance(body.get("models"), list) and body["models"]:
        model = _first(body["models"])
    else:
        return None
    if model is not None and not isinstance(model, str):
        raise bad_request("model must be a string or null")
    return (model or "").strip()


def _role_settings(body: Mapping[str, object]) -> dict[str, object]:
    """The given ones of role (smg's worker_type), kv_connector, bootstrap_port, ranks, loras,
    kv_events and kv_replay."""
    settings: dict[str, object] = {}
    for name in ("worker_type", "role"):
        if name in body:
            if settings.get("role", body[name]) != body[name]:
                raise bad_request("role and worker_type differ; one of them is enough")
            settings["role"] = _one_of(name, body[name], get_args(Role))
    if body.get("kv_connector") is not None:
        settings["kv_connector"] = _one_of(
            "kv_connector", body["kv_connector"], get_args(KvConnector)
        )
    if "bootstrap_port" in body:
        settings["bootstrap_port"] = _bootstrap_port(body["bootstrap_port"], settings.get("role"))
    if "ranks" in body:
        settings["ranks"] = _ranks(body["ranks"])
    if "loras" in body:
        settings["loras"] = _loras(body["loras"])
    for name, read in (("kv_events", read_kv_events), ("kv_replay", read_kv_replay)):
        if name in body:
            settings[name] = _endpoint(name, body[name], read)
    return settings


def _balance_settings(body: Mapping[str, object]) -> dict[str, object]:
    for name, minimum, maximum in (("weight", 1, MAX_WEIGHT), ("max_inflight", 0, MAX_INTEGER)):
        value = body.get(name, minimum)
        if not _is_count(value) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise bad_request(f"{name} must be a whole number, {minimum} to {maximum}")
    return {name: body[name] for name in BALANCE_KEYS if name in body}


def _one_of(name: str, value: object, choices: Sequence[str]) -> str:
    if value not in choices or not isinstance(value, str):
        shown = ", ".join(f'"{choice}"' for choice in choices)
        raise bad_request(f"{name} must be one of {shown}")
    return value


def _bootstrap_port(value: object, role: object) -> int:
    """The port; 0 for null. Raises HttpError 400."""
    if value is None:
        return 0
    if not _is_count(value) or not isinstance(value, int) or not 1 <= value <= MAX_PORT:
        raise bad_request(f"bootstrap_port must be a port, 1 to {MAX_PORT}, or null")
    if role in ("regular", "decode"):
        raise bad_request(f"bootstrap_port is for prefill workers only, not for role {role}")
    return value


def _ranks(value: object) -> int | str:
    if value == "auto":
        return "auto"
    if not _is_count(value) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise bad_request(f'ranks must be a whole number, 1 to {MAX_RANKS}, or "auto"')
    return value


def _endpoint(name: str, value: object, read: Callable[[object], object]) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a string")
    try:
        return str(read(value))
    except ValueError as error:
        raise bad_request(f"{name}: {'; '.join(map(str, error.args))}") from None


def _loras(value: object) -> tuple[str, ...] | str:
    if value == "auto":
        return "auto"
    names = value if isinstance(value, list) else [None]
    if not all(isinstance(name, str) and name for name in names):
        raise bad_request('loras must be a list of adapter names, or "auto"')
    return tuple(str(name) for name in names)


def _first(models: object) -> object:
    """smg lists model cards or names; a worker here has one model."""
    first = models[0] if isinstance(models, list) else None
    return first.get("id") if isinstance(first, dict) else first


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


_SMG_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "priority": (_is_count, "a whole number from 0 on"),
    "cost": (_is_number, "a number from 0 on"),
    "labels": (lambda value: isinstance(value, dict), "an object"),
    "connection_mode": (
        lambda value: str(value).lower() == "http",
        '"http": no other is supported',
    ),
}


def _remarks(body: Mapping[str, object]) -> dict[str, object]:
    for name, (holds, expected) in _SMG_RULES.items():
        if name in body and not holds(body[name]):
            raise bad_request(f"{name} must be {expected}")
    return {name: body[name] for name in ("priority", "cost", "labels") if name in body}


@dataclass(slots=True)
class WorkerNote:
    """A client's note on a worker; the defaults are those of sgl-model-gateway."""

    priority: int = 50
    cost: float = 1.0
    labels: dict[str, object] = field(default_factory=dict)
    requested_at: datetime | None = None  # added in the background, and not healthy since


class WorkerNotes:
    """`gateway_ids`: worker ids are UUIDs, as in sglang-router."""

    def __init__(self, fleet: Fleet, *, gateway_ids: bool = False) -> None:
        self._fleet = fleet
        self._gateway_ids = gateway_ids
        self._notes: dict[Worker, WorkerNote] = {}

    def get(self, worker: Worker) -> WorkerNote:
        return self._notes.get(worker) or WorkerNote()

    def public_id(self, worker: Worker) -> str:
        """The worker's id for `id` and `worker_id` of responses."""
        return gateway_id(worker.url) if self._gateway_ids else worker.id

    def update(self, worker: Worker, fields: Mapping[str, object]) -> None:
        """Set the `fields` that `WorkerNote` has; others are ignored."""
        note = self._notes.setdefault(worker, WorkerNote())
        for name in WorkerNote.__slots__:
            if name in fields:
                setattr(note, name, fields[name])
        self._notes = {w: self._notes[w] for w in self._fleet.workers if w in self._notes}

    def job_status(
        self, worker: Worker, now: datetime, startup_timeout_secs: float
    ) -> dict[str, object]:
        """`{"job_status": ...}` of an addition in the background; {} once it is done. After the
        time-out (0: none) its status is "failed", until the worker becomes healthy."""
        note = self._notes.get(worker)
        if note is None or note.requested_at is None:
            return {}
        health = worker.health
        if health.state is Health.HEALTHY:
            note.requested_at = None
            return {}
        status = "processing" if health.last_checked_at else "pending"
        waited_secs = (now - note.requested_at).total_seconds()
        if health.state is Health.DEAD or 0 < startup_timeout_secs <= waited_secs:
            status = "failed"
        job = {
            "job_type": "AddWorker",
            "worker_url": worker.url,
            "status": status,
            "message": health.last_error or "waiting for its first probes",
            "timestamp": note.requested_at.isoformat(),
        }
        return {"job_status": job}
