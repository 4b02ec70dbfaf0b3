"""The paths of engines' control routes, and the translation of an admin call between the dialects
of SGLang and vLLM. Pure.

The proxy calls engines at these paths, and the routes of the admin API (`admin_route_table.py`) and
the merge of responses (`results.py`) are found by them. A caller uses one dialect, and a fleet may
have engines of both. A call is sent unchanged; a worker without the route gets the translation.
Invariant: a translation requests the same operation. An operation that the other kind of engine
can't do has no row in `_TABLE`; the worker's refusal is then the result.

Sources: note:features 3.2, note:real-engines 5.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

# SGLang
INIT: Final = "/init_weights_update_group"
PREPARE: Final = "/prepare_weights_update"
COMPLETE: Final = "/complete_weights_update"
DESTROY: Final = "/destroy_weights_update_group"
BEGIN: Final = "/begin_weight_update"
END: Final = "/end_weight_update"
FROM_DISK: Final = "/update_weights_from_disk"
FROM_DISTRIBUTED: Final = "/update_weights_from_distributed"
FROM_TENSOR: Final = "/update_weights_from_tensor"
UPDATE_VERSION: Final = "/update_weight_version"
PAUSE_GENERATION: Final = "/pause_generation"
CONTINUE_GENERATION: Final = "/continue_generation"
FLUSH_CACHE: Final = "/flush_cache"
WEIGHTS_CHECKER: Final = "/weights_checker"
WEIGHTS_BY_NAME: Final = "/get_weights_by_name"
MODEL_INFO: Final = "/model_info"
SERVER_INFO: Final = "/server_info"
ABORT_REQUEST: Final = "/abort_request"
LOAD_ADAPTER: Final = "/load_lora_adapter"
UNLOAD_ADAPTER: Final = "/unload_lora_adapter"

# The second path exists in older engines, too; /get_model_info needs no key.
MODEL_INFO_PATHS: Final = (MODEL_INFO, "/get_model_info")
SERVER_INFO_PATHS: Final = (SERVER_INFO, "/get_server_info")

# vLLM
PAUSE: Final = "/pause"
RESUME: Final = "/resume"
SLEEP: Final = "/sleep"
WAKE_UP: Final = "/wake_up"
IS_PAUSED: Final = "/is_paused"
IS_SLEEPING: Final = "/is_sleeping"
WORLD_SIZE: Final = "/get_world_size"
WEIGHT_INFO: Final = "/weight_info"
WEIGHT_CHECKER: Final = "/weight_checker"
TRANSFER_INIT: Final = "/init_weight_transfer_engine"
TRANSFER_SHUTDOWN: Final = "/shutdown_weight_transfer_engine"
START_UPDATE: Final = "/start_weight_update"
START_DRAFT_UPDATE: Final = "/start_draft_weight_update"
UPDATE_WEIGHTS: Final = "/update_weights"
FINISH_UPDATE: Final = "/finish_weight_update"
RPC_ALL: Final = "/collective_rpc"
RESET_PREFIX_CACHE: Final = "/reset_prefix_cache"
ABORT_REQUESTS: Final = "/abort_requests"
V1_LOAD_ADAPTER: Final = "/v1/load_lora_adapter"
V1_UNLOAD_ADAPTER: Final = "/v1/unload_lora_adapter"


CHECKSUM: Final = b'{"action": "checksum"}'
# Before a pause in mode `wait` the proxy itself waits until no requests run. vLLM has no `retract`.
_MODES_OF_SGLANG: Final = {"abort": "abort", "wait": "retract", "keep": "in_place"}
_MODES_OF_VLLM: Final = {"abort": "abort", "retract": "keep", "in_place": "keep"}


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A request to an engine; `target` is its path and query."""

    method: str
    target: str
    body: bytes = b""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def argument(self, name: str) -> object:
        """A key of the query or, if it is not there, of the JSON body; else None."""
        query = dict(parse_qsl(self.target.partition("?")[2]))
        return query[name] if name in query else _fields(self.body).get(name)


_Translation = Callable[[EngineCall], tuple[EngineCall, ...]]


def translate(call: EngineCall) -> tuple[EngineCall, ...]:
    """The sequence of calls for the same operation at an engine of the other kind.

    () if that kind can't do it, or has the same call.
    """
    translation = _TABLE.get(call.path)
    return translation(call) if translation is not None else ()


def with_defaults(path: str, body: bytes) -> bytes:
    """The body of an admin call with a safe default added.

    SGLang's /update_weight_version aborts all running requests by default, even after a pause that
    should keep them (note:features 3.1).
    """
    if path != UPDATE_VERSION:
        return body
    fields = _fields(body)
    if not fields or "abort_all_requests" in fields:
        return body
    return json.dumps({**fields, "abort_all_requests": False}).encode()


def _pause(call: EngineCall) -> tuple[EngineCall, ...]:
    mode = _MODES_OF_SGLANG.get(str(call.argument("mode") or "abort"))
    return (_post(PAUSE_GENERATION, mode=mode),) if mode else ()


def _pause_generation(call: EngineCall) -> tuple[EngineCall, ...]:
    mode = _MODES_OF_VLLM.get(str(call.argument("mode") or "abort"))
    return (EngineCall("POST", f"{PAUSE}?mode={mode}"),) if mode else ()


def _checksum_at(path: str) -> _Translation:
    def translation(call: EngineCall) -> tuple[EngineCall, ...]:
        is_checksum = call.argument("action") in (None, "checksum")
        return (EngineCall("POST", path, CHECKSUM),) if is_checksum else ()

    return translation


def _update_from_disk(call: EngineCall) -> tuple[EngineCall, ...]:
    """Flushes the cache by default, as SGLang does."""
    path, label = call.argument("model_path"), call.argument("weight_version")
    if not isinstance(path, str):
        return ()
    reload = _post(RPC_ALL, method="reload_weights", kwargs={"weights_path": path})
    flushes = call.argument("flush_cache") is not False
    flush = (EngineCall("POST", RESET_PREFIX_CACHE),) if flushes else ()
    relabel = (_post(UPDATE_VERSION, new_version=str(label)),) if label is not None else ()
    return (reload, *flush, *relabel)


def _abort_all(call: EngineCall) -> tuple[EngineCall, ...]:
    """Only for all requests: a single request has a different id at the other engine."""
    return () if call.argument("request_ids") else (_post(ABORT_REQUEST, abort_all=True),)


def _without_arguments(method: str, path: str) -> _Translation:
    """A call without arguments."""
    return lambda _: (EngineCall(method, path),)


def _forward_to(path: str) -> _Translation:
    """Sends the body unchanged to another path."""
    return lambda call: (EngineCall(call.method, path, call.body),)


_TABLE: Final[Mapping[str, _Translation]] = {
    PAUSE: _pause,
    PAUSE_GENERATION: _pause_generation,
    RESUME: lambda _: (_post(CONTINUE_GENERATION),),
    CONTINUE_GENERATION: _without_arguments("POST", RESUME),
    RESET_PREFIX_CACHE: _without_arguments("POST", FLUSH_CACHE),
    FLUSH_CACHE: _without_arguments("POST", RESET_PREFIX_CACHE),
    WEIGHT_INFO: _without_arguments("GET", MODEL_INFO),
    MODEL_INFO: _without_arguments("GET", WEIGHT_INFO),
    WEIGHT_CHECKER: _checksum_at(WEIGHTS_CHECKER),
    WEIGHTS_CHECKER: _checksum_at(WEIGHT_CHECKER),
    FROM_DISK: _update_from_disk,
    WORLD_SIZE: _without_arguments("GET", SERVER_INFO),
    ABORT_REQUESTS: _abort_all,
    LOAD_ADAPTER: _forward_to(V1_LOAD_ADAPTER),
    UNLOAD_ADAPTER: _forward_to(V1_UNLOAD_ADAPTER),
    V1_LOAD_ADAPTER: _forward_to(LOAD_ADAPTER),
    V1_UNLOAD_ADAPTER: _forward_to(UNLOAD_ADAPTER),
}


def _post(path: str, **fields: object) -> EngineCall:
    return EngineCall("POST", path, json.dumps(fields).encode())


def _fields(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
