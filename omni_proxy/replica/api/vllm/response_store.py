"""Stored responses: what `GET /v1/responses/{id}` and `previous_response_id` read.

Invariant: at most `limit` responses and MAX_BYTES of text are kept, the oldest go first; a response
is stored with the messages that led to it, so that a follow-up continues them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from omni_proxy.replica.pipeline.requests import PromptMessage

MAX_BYTES: Final = 64 << 20
RUNNING: Final = ("queued", "in_progress")


def do_nothing() -> None:
    """The default of `cancel`."""


@dataclass(slots=True)
class StoredResponse:
    """`messages`: the conversation so far, without instructions; `cancel` ends its generation."""

    body: dict[str, Any]
    messages: list[PromptMessage]
    cancel: Callable[[], None] = field(default=do_nothing)

    @property
    def running(self) -> bool:
        return self.body["status"] in RUNNING

    @property
    def nbytes(self) -> int:
        texts = sum(len(part) for message in self.messages for part in _texts(message))
        return 1024 + 4 * texts


def _texts(message: PromptMessage) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]
    return [str(part.get("text") or "") for part in message.content]


class ResponseStore:
    """`limit` 0 stores nothing, which is vLLM's default."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def get(self, response_id: str) -> StoredResponse | None:
        return self._stored.get(response_id)

    def put(self, response: StoredResponse) -> None:
        """Stores it, or what it has become."""
        if not self.limit:
            return
        response_id = response.body["id"]
        self._stored[response_id] = response
        self._sizes[response_id] = response.nbytes
        while len(self._stored) > self.limit or (
            len(self._stored) > 1 and sum(self._sizes.values()) > MAX_BYTES
        ):
            self.delete(next(iter(self._stored)))

    def delete(self, response_id: str) -> bool:
        """Whether there was one; what still generates it is ended."""
        response = self._stored.pop(response_id, None)
        self._sizes.pop(response_id, None)
        if response is None:
            return False
        if response.running:
            response.cancel()
        return True
