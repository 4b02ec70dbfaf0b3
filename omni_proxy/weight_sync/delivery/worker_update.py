"""Calls to one worker in a rollout or a catch-up: inspection, loading, proof, probe request.

The dialect of an engine is detected by its replies:

    dialect         detected by                   loads by                    restores
    disk            /model_info, /get_model_info  /update_weights_from_disk   its model_path
    collective_rpc  /weight_info (vLLM, dev mode) reload_weights, then        root in /v1/models
                                                  /update_weight_version
Invariant: after a result with `unchanged` the engine still has its former weights. A load is never
assumed to have worked: label and digest are read from the worker. Sources: note:weight-sync 3,
note:real-engines 5.1, and the CPU build of vLLM 0.32.0 for `reload_weights`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from omni_proxy.admin_ops.engine_dialects import (
    FROM_DISK,
    MODEL_INFO_PATHS,
    RPC_ALL,
    UPDATE_VERSION,
    WEIGHT_INFO,
)
from omni_proxy.admin_ops.results import WorkerResult, label_reported, version_of
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import (
    JSON_TYPE,
    ROUTE_ABSENT,
    Call,
    flush_cache,
    generate_token,
)
from omni_proxy.weight_sync.delivery.deliver import DeliveryOptions, VersionDeliverer
from omni_proxy.weight_sync.protocol.checksum_agreement import (
    Digest,
    compare_digests,
    parse_digest,
)
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.version_store import UnknownVersion
from omni_proxy.weight_sync.worker_calls import (
    LABEL_SECS,
    call_once,
    read_labels,
    request_checksums,
)

BY_DISK: Final = "disk"
BY_RPC: Final = "collective_rpc"
# Errors of a vLLM server that lacks the call, so its weights are unchanged.
_UNKNOWN_CALL: Final = ("unexpected keyword argument", "has no attribute 'reload_weights'")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that a worker reports. `path`: the weights that it loaded, "" if not reported."""

    dialect: str
    label: str
    path: str


class CannotUpdate(Exception):
    """A rollout can't change the weights of this worker; the text has the reason."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The source of a version: a path that the worker reads, or a stored version."""

    label: str
    path: str = ""
    load_format: str = ""
    version: StoredVersion | None = None


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """`secs`: timeout of a call; `headers`: the caller's credentials; `verify`: compare digests."""

    secs: float
    verify: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)


async def inspect(worker: Worker, headers: Mapping[str, str]) -> EngineFacts:
    """Detect the dialect, and read label and path. Raises CannotUpdate."""
    for path in MODEL_INFO_PATHS:
        result = await _get(worker, path, headers)
        if result.sent_to:
            continue  # it replied in vLLM's dialect, which is used below
        if result.success:
            return EngineFacts(BY_DISK, _label(result, path), _one(result.body, "model_path"))
        if result.status not in ROUTE_ABSENT:
            raise CannotUpdate(f"GET {path}: {result.reason}")
    result = await _get(worker, WEIGHT_INFO, headers)
    if result.success:
        return EngineFacts(BY_RPC, _label(result, WEIGHT_INFO), await _root_path(worker, headers))
    if result.status not in ROUTE_ABSENT:
        raise CannotUpdate(f"GET {WEIGHT_INFO}: {result.reason}")
    raise CannotUpdate(
        "it has neither /model_info nor /weight_info: it is not an SGLang server, nor a vLLM "
        "server in dev mode (VLLM_SERVER_DEV_MODE=1), so its weights can't be changed"
    )


class WorkerUpdater:
    """Loads versions into workers; stored ones go through `deliverer`."""

    def __init__(self, deliverer: VersionDeliverer) -> None:
        self._deliverer = deliverer

    async def load(
        self, worker: Worker, dialect: str, source: WeightSource, settings: UpdateSettings
    ) -> WorkerResult:
        """Load a version. Failures of the worker are results, not exceptions."""
        if source.version is not None:
            return await self._deliver(worker, source, source.version, settings)
        if dialect == BY_RPC:
            return await _reload(worker, source, settings)
        body = {"model_path": source.path, "weight_version": source.label, "flush_cache": True}
        if source.load_format:
            body["load_format"] = source.load_format
        return await _post(worker, FROM_DISK, body, settings)

    async def _deliver(
        self, worker: Worker, source: WeightSource, version: StoredVersion, settings: UpdateSettings
    ) -> WorkerResult:
        options = DeliveryOptions(
            label=source.label,
            prove=settings.verify,
            headers=settings.headers,
            limit=settings.secs,
        )
        try:
            (result,) = await self._deliverer.deliver(version, [worker], options)
        except (UnknownVersion, OSError) as error:
            reason = f"{version.name} can't be read: {error}"
            return WorkerResult(worker.url, 404, {"message": reason})
        return result


async def read_digest(worker: Worker, settings: UpdateSettings) -> Digest | None:
    """The worker's digest; None if it reports none that can be compared."""
    (result,) = await request_checksums([worker], settings.headers, settings.secs)
    digest = parse_digest(result)
    return digest if isinstance(digest, Digest) else None


async def check_label(worker: Worker, label: str, settings: UpdateSettings) -> str:
    """Why the worker's label shows that it doesn't have the version; "" if the label is right."""
    now = (await read_labels([worker], settings.headers))[worker]
    return "" if now == label else f"it reports the weight version {now!r} after loading {label!r}"


def differs(digest: Digest | None, expected: Digest | None) -> bool:
    """Whether both digests can be compared and are not equal."""
    if digest is None or expected is None:
        return False
    return bool(compare_digests({"it": digest, "wanted": expected}).mismatched)


async def warm_up(worker: Worker, settings: UpdateSettings) -> str:
    """Send a probe request that generates a token; return why it failed, "" if it did not.

    A 4xx is not a failure: an engine that generates no text refuses the request.
    """
    result = await generate_token(worker, settings.headers, settings.secs)
    if result.ok or (result.status is not None and 400 <= result.status < 500):
        return ""
    response_text = result.detail or result.body[:200].decode("utf-8", "replace")
    return f"the probe request failed: {result.failure}" + (
        f": {response_text}" if response_text else ""
    )


async def _reload(worker: Worker, source: WeightSource, settings: UpdateSettings) -> WorkerResult:
    """vLLM: load the path on every rank in place, flush the cache, set the label."""
    call = {"method": "reload_weights", "kwargs": {"weights_path": source.path}}
    loaded = await _post(worker, RPC_ALL, call, settings)
    if not loaded.success:
        if any(phrase in loaded.reason for phrase in _UNKNOWN_CALL):
            reason = f"it can't reload weights from a path: {loaded.reason}"
            return replace(loaded, status=400, body={"message": reason})
        return loaded
    flushed = await flush_cache(worker, settings.headers, settings.secs)
    if not flushed.ok:
        message = f"weights were updated, but the prefix cache was not flushed: {flushed.failure}"
        return replace(loaded, status=502, body={"success": False, "message": message})
    labelled = await _post(worker, UPDATE_VERSION, {"new_version": source.label}, settings)
    if not labelled.success:
        message = f"weights were updated, but not their label: {labelled.reason}"
        return replace(loaded, status=502, body={"success": False, "message": message})
    return loaded


async def _root_path(worker: Worker, headers: Mapping[str, str]) -> str:
    result = await _get(worker, "/v1/models", headers)
    cards = result.body.get("data") if result.success and isinstance(result.body, dict) else None
    roots = [
        card["root"]
        for card in (cards if isinstance(cards, list) else ())
        if isinstance(card, dict) and isinstance(card.get("root"), str) and not card.get("parent")
    ]
    return roots[0] if roots else ""


async def _get(worker: Worker, path: str, headers: Mapping[str, str]) -> WorkerResult:
    return await call_once(worker, Call("GET", path, headers=headers, timeout_secs=LABEL_SECS))


async def _post(
    worker: Worker, path: str, body: Mapping[str, Any], settings: UpdateSettings
) -> WorkerResult:
    headers, raw = {**settings.headers, **JSON_TYPE}, json.dumps(body).encode()
    return await call_once(worker, Call("POST", path, raw, headers, timeout_secs=settings.secs))


def _label(result: WorkerResult, path: str) -> str:
    """Raises CannotUpdate without a label, which distinguishes old and new weights."""
    label = version_of(result.body)
    if label is None:
        raise CannotUpdate(f"GET {path} reports no weight_version, or several")
    return label


def _one(body: object, fact: str) -> str:
    labels = label_reported(body, fact)
    return str(labels[0]) if len(labels) == 1 else ""
