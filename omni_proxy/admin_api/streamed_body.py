"""Bodies of responses that are sent for a long time, and the bound on their number."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Self

from quart.wrappers.response import ResponseBody

from omni_proxy.wire.errors import HttpError

RETRY = b"retry: 2000\n"  # ms until a disconnected browser reconnects


class ReaderLimit:
    """Counts the readers and bounds their number."""

    def __init__(self, limit: int, code: str) -> None:
        self.count = 0
        self._limit = limit
        self._code = code

    def check_limit(self) -> None:
        if self.count >= self._limit:
            message = f"{self.count} readers are served already"
            refusal = HttpError(503, message, self._code)
            raise refusal.with_headers(("retry-after", "2"))


class Body(ResponseBody):
    """A body that counts as a reader while it is sent.

    Not a generator: an abandoned generator is closed at an undefined time.
    """

    def __init__(self, readers: ReaderLimit) -> None:
        self._readers = readers

    async def __aenter__(self) -> Self:
        self._readers.count += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._readers.count -= 1

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes: ...
