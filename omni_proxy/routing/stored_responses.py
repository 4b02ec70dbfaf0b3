"""Stored responses of /v1/responses: a request that refers to one goes to the worker that has it.

Pure. Invariant: the id of a response is recorded with its worker before the client receives it; the
response is not modified. At most `MAX_RESPONSES` ids are kept, the least recently used are dropped.
A request that refers to an unknown id may go to any worker, which answers it. Source: features.md 4
(contracts).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Protocol
from urllib.parse import unquote

from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.body_fields import read_text
from omni_proxy.routing.inspect.keyed_text import keyed_value
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.session_load import OwnSessions
from omni_proxy.routing.routes import NAMED, UNPINNED

STEM: Final = "/v1/responses/"
MAX_RESPONSES: Final = 100_000
SCANNED_BYTES: Final = 16 * 1024  # of a response: its id is near the beginning
_OWN_ID: Final = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,251})"')
_ANY_ID: Final = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')


class ResponseOwners(Protocol):
    """Workers by the ids of responses that they stored. `now` is monotonic seconds."""

    def find(self, key: str, now: float) -> Worker | None: ...
    def keep(self, key: str, worker: Worker, now: float) -> None: ...


def own_response_owners() -> ResponseOwners:
    """A table in this process's memory."""
    owners = OwnSessions()
    owners.tune(MAX_RESPONSES, 0)
    return owners


def named_response(path: str, body: bytes) -> str:
    """The response id that a request refers to, in its path or as `previous_response_id`; or ""."""
    if path.startswith(STEM):
        return unquote(path.removeprefix(STEM).partition("/")[0])
    return read_text(keyed_value(body, "previous_response_id")) or ""


def pin_to_response_owner(
    requirements: Requirements, response_id: str, owners: ResponseOwners, now: float
) -> None:
    """Pin the request to the worker that stored the response, if it is known."""
    worker = owners.find(response_id, now) if response_id else None
    if worker is None:
        requirements.pinning = UNPINNED
    else:
        requirements.pinning, requirements.named_worker = NAMED, worker.url


class ResponseIdScanner:
    """Finds the id near the beginning of a response, and passes it to `match` once."""

    __slots__ = ("_found", "_head", "done")

    def __init__(self, match: Callable[[str], None]) -> None:
        self._found = match
        self._head = b""
        self.done = False

    def scan(self, chunk: bytes) -> None:
        """Scan the next bytes. They may be in chunked encoding: an id is rarely split by it."""
        if self.done:
            return
        head = self._head = self._head + chunk[: SCANNED_BYTES - len(self._head)]
        match = _OWN_ID.search(head) or _ANY_ID.search(head)
        if match is None and len(head) < SCANNED_BYTES:
            return
        self.done, self._head = True, b""
        if match is not None:
            self._found(match[1].decode("utf-8", "replace"))
