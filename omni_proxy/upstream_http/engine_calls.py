"""Operations that engines serve at different paths: flush the cache, generate a token.

Invariant: only the engine's confirmation of the operation is a success, never another route's 200.
Sources: routers.md 1.6, real-engines.md 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, CallResult, call_worker

FLUSH_PATHS: Final = ("/flush_cache", "/reset_prefix_cache")  # SGLang's, vLLM's
_JSON: Final = {"content-type": "application/json"}
_TOKEN: Final = {"max_tokens": 1, "temperature": 0}


async def flush_cache(
    worker: Worker, headers: Mapping[str, str], timeout_secs: float
) -> CallResult:
    """The result of the first flush route that the worker has."""
    calls = [Call("POST", path, headers=headers, timeout_secs=timeout_secs) for path in FLUSH_PATHS]
    return await _first_of(worker, calls)


async def generate_token(
    worker: Worker, headers: Mapping[str, str], timeout_secs: float
) -> CallResult:
    """Call the worker's generating health check if it has one, else generate one token."""
    sent = {**headers, **_JSON}
    completion = {"prompt": "hi", **_TOKEN, **({"model": worker.model} if worker.model else {})}
    sampling = {"text": "hi", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    calls = [
        Call("GET", "/health_generate", headers=headers, timeout_secs=timeout_secs),
        Call("POST", "/v1/completions", _body(completion), sent, timeout_secs),
        Call("POST", "/generate", _body(sampling), sent, timeout_secs),
    ]
    return await _first_of(worker, calls)


async def _first_of(worker: Worker, calls: list[Call]) -> CallResult:
    """The response of the first route that the worker has, else of the last route."""
    for call in calls[:-1]:
        result = await call_worker(worker, call)
        if result.status not in ROUTE_ABSENT:
            return result
    return await call_worker(worker, calls[-1])


def _body(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields).encode()
