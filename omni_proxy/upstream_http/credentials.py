"""Credentials for workers: the worker's own key, of the variable `api_key_env`, or the caller's.

Invariant: a request to a worker with its own key has no other credential. The variable is read for
each request, so a worker whose variable is not set gets the caller's credentials.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from omni_proxy.fleet.worker import Worker
from omni_proxy.wire.request import set_bearer

AUTHORIZATION: Final = "authorization"
API_KEY_HEADER: Final = "x-api-key"


def own_key(worker: Worker) -> str:
    """The worker's own key; "" if it has none or its variable is not set."""
    return os.environ.get(worker.api_key_env, "") if worker.api_key_env else ""


def bearer(key: str) -> dict[str, str]:
    return {AUTHORIZATION: f"Bearer {key}"}


def lines_with_own_key(worker: Worker, lines: bytes) -> bytes:
    """The lines of a head, with the worker's own key if it has one."""
    key = own_key(worker)
    return set_bearer(lines, key.encode("latin-1", "replace")) if key else lines


def headers_with_own_key(worker: Worker, headers: Mapping[str, str]) -> Mapping[str, str]:
    """Header fields with lower-case names, with the worker's own key if it has one."""
    key = own_key(worker)
    if not key:
        return headers
    kept = {name: value for name, value in headers.items() if name != API_KEY_HEADER}
    return kept | bearer(key)


def credentials_of(headers: Mapping[str, str]) -> dict[str, str]:
    """The header fields for further calls to workers on behalf of a call with `headers`."""
    value = headers.get(AUTHORIZATION)
    return {AUTHORIZATION: value} if value else {}
