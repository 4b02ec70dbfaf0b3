"""Delivery of a request's output to its reader: the queue, its chunks, and the joined response.

`Delivery` is the queue from the coordinator to one reader: chunks in order, then exactly one end.
`ChunkSplitter` makes chunks of stage output; `ChunkAssembler` joins chunks into one response.
Invariant: queued bytes are bounded, per reader and in total; above a bound the stream ends with an
error. Each part of a stage's text, tokens, log probabilities and audio is sent once, streamed or at
the end. Only the last chunk is terminal and has a finish reason. All methods except `take` are
synchronous.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk, RequestFailed

_CHUNK_KEYS = frozenset(
    {
        "text",
        "token_ids",
        "output_token_logprobs",
        "audio_data",
        "sample_rate",
        "modality",
        "finish_reason",
        "usage",
        "weight_version",
    }
)


class ChunkSplitter:
    """Takes streamed parts and results of stages; `pending` holds the chunks to deliver."""

    def __init__(self, request_id: str) -> None:
        self.pending: deque[GenerateChunk] = deque()
        self._request_id = request_id
        self._sent: defaultdict[str, StreamedLengths] = defaultdict(StreamedLengths)

    def add_part(self, stage: str, chunk: dict[str, Any], *, whole: bool) -> None:
        """Add a streamed part, or a stage's complete result while other stages still work."""
        sent = self._sent[stage]
        part = sent.remaining(chunk) if whole else chunk
        sent.add(part)
        if any(part.get(key) for key in ("text", "token_ids", "audio_data")) or not whole:
            self.pending.append(_chunk(self._request_id, stage, part))

    def end(self, results: Mapping[str, dict[str, Any]]) -> None:
        """Add all results: the rest of the other stages first, the text stage's last."""
        main = next((stage for stage in results if "text" in results[stage]), next(iter(results)))
        for stage, whole in results.items():
            if stage != main:
                self.add_part(stage, whole, whole=True)
        extra: dict[str, Any] = {}
        for whole in results.values():
            extra |= _extra(whole)
        remaining = self._sent[main].remaining(results[main])
        finish_reason = remaining.get("finish_reason") or "stop"
        remaining = remaining | extra | {"finish_reason": finish_reason}
        self.pending.append(_chunk(self._request_id, main, remaining, terminal=True))


def _extra(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in _CHUNK_KEYS}


def _chunk(
    request_id: str, stage: str, data: dict[str, Any], *, terminal: bool = False
) -> GenerateChunk:
    audio = data.get("audio_data")
    return GenerateChunk(
        request_id=request_id,
        text=data.get("text") or "",
        token_ids=data.get("token_ids") or (),
        audio=audio or None,
        sample_rate=data.get("sample_rate") or 0,
        modality=data.get("modality") or ("audio" if audio else "text"),
        finish_reason=data.get("finish_reason") if terminal else None,
        usage=data.get("usage"),
        logprobs=data.get("output_token_logprobs"),
        weight_version=data.get("weight_version"),
        stage=stage,
        terminal=terminal,
        extra=_extra(data),
    )


class ChunkAssembler:
    """Joins a request's chunks into one response."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._texts: list[str] = []
        self._audio: list[bytes] = []
        self._sample_rate = 0
        self._token_ids: list[int] = []
        self._logprobs: list[Any] | None = None
        self._extra: dict[str, Any] = {}
        self._last: GenerateChunk | None = None

    def add(self, chunk: GenerateChunk) -> None:
        self._texts.append(chunk.text)
        self._token_ids += chunk.token_ids
        if chunk.audio:
            self._audio.append(chunk.audio)
            self._sample_rate = chunk.sample_rate or self._sample_rate
        if chunk.logprobs is not None:
            self._logprobs = [*(self._logprobs or []), *chunk.logprobs]
        self._extra |= chunk.extra
        if chunk.terminal:
            self._last = chunk

    def result(self) -> CompletionResult:
        """Return the response; only after the terminal chunk."""
        assert self._last is not None, "no terminal chunk was added"
        return CompletionResult(
            request_id=self._request_id,
            text="".join(self._texts),
            audio=b"".join(self._audio) if self._audio else None,
            sample_rate=self._sample_rate,
            finish_reason=self._last.finish_reason or "stop",
            usage=self._last.usage,
            logprobs=self._logprobs,
            weight_version=self._last.weight_version,
            token_ids=self._token_ids,
            extra=self._extra,
        )


# The streamed part of a stage's result, and the rest. Together they are the complete result: each
# character, token and byte once.

GROWING_KEYS = ("text", "token_ids", "output_token_logprobs", "audio_data")


class StreamedLengths:
    """How much of a stage's result was streamed for one request, per key."""

    __slots__ = ("_lengths",)

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        for key in GROWING_KEYS:
            if part := chunk.get(key):
                self._lengths[key] = self._lengths.get(key, 0) + len(part)

    def remaining(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return `whole` without the streamed part; other keys are unchanged."""
        lengths = self._lengths
        return {
            key: value[lengths[key] :] if key in lengths and value else value
            for key, value in whole.items()
        }


def size_bytes(chunk: dict[str, Any]) -> int:
    """Approximate memory of a waiting chunk."""
    tokens = len(chunk.get("token_ids") or ()) + 3 * len(chunk.get("output_token_logprobs") or ())
    return 256 + len(chunk.get("text") or "") + len(chunk.get("audio_data") or b"") + 8 * tokens


READER_BYTES = 128 << 20
TOTAL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class DeliveredChunk:
    """Part of a stage's output, or its complete result while other stages still work."""

    stage: str
    chunk: dict[str, Any]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class DeliveryEnd:
    """The complete results of the terminal stages; nothing follows."""

    results: dict[str, dict[str, Any]]


class Delivery:
    """One reader's queue; `take` is called by one task at a time."""

    def __init__(self, request_id: str, backlog: DeliveryBacklog) -> None:
        self.request_id = request_id
        self.waiting_bytes = 0
        self.last_taken_at = trio.current_time()
        self.end: DeliveryEnd | RequestFailed | None = None
        self._backlog = backlog
        self._chunks: deque[DeliveredChunk] = deque()
        self._arrived = trio.Event()

    def put(self, chunk: DeliveredChunk) -> None:
        if self.end is None:
            if not self._chunks:
                self.last_taken_at = trio.current_time()  # don't count time with nothing to take
            size = size_bytes(chunk.chunk)
            self._chunks.append(chunk)
            self.waiting_bytes += size
            self._backlog.on_put(self, size)
            self._arrived.set()

    def finish(self, end: DeliveryEnd | RequestFailed) -> None:
        """Only the first end counts; chunks before it can still be taken."""
        if self.end is None:
            self.end = end
            self._arrived.set()

    def drop(self) -> None:
        """Discard waiting chunks: the reader has left."""
        self._chunks.clear()
        self._backlog.on_taken(self.waiting_bytes)
        self.waiting_bytes = 0

    async def take(self) -> DeliveredChunk | DeliveryEnd:
        """Return the next chunk or the end; raises RequestFailed if that is the end."""
        while True:
            await trio.lowlevel.checkpoint()
            if self._chunks:
                chunk = self._chunks.popleft()
                size = size_bytes(chunk.chunk)
                self.waiting_bytes -= size
                self._backlog.on_taken(size)
                self.last_taken_at = trio.current_time()
                return chunk
            if isinstance(self.end, RequestFailed):
                raise self.end
            if self.end is not None:
                return self.end
            self._arrived = trio.Event()
            await self._arrived.wait()


class DeliveryBacklog:
    """All open deliveries and their queued bytes.

    `cut(request_id, error)` is called to end the request of a reader that is too slow.
    """

    def __init__(
        self,
        cut: Callable[[str, RequestFailed], None],
        *,
        reader_bytes: int = READER_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        self._cut = cut
        self._reader_bytes = reader_bytes
        self._total_bytes = total_bytes
        self._open: dict[str, Delivery] = {}
        self._waiting_bytes = 0
        self._failed = 0

    def open(self, request_id: str) -> Delivery:
        delivery = Delivery(request_id, self)
        self._open[request_id] = delivery
        return delivery

    def close(self, delivery: Delivery) -> None:
        delivery.drop()
        self._open.pop(delivery.request_id, None)

    def on_put(self, delivery: Delivery, size: int) -> None:
        self._waiting_bytes += size
        if delivery.waiting_bytes > self._reader_bytes:
            self._fail(delivery)
        elif self._waiting_bytes > self._total_bytes:
            waiting = [reader for reader in self._open.values() if reader.waiting_bytes]
            self._fail(min(waiting, key=lambda reader: reader.last_taken_at))

    def on_taken(self, size: int) -> None:
        self._waiting_bytes -= size

    def counters(self) -> dict[str, float]:
        """The `stream_delivery` of GET /health (note:api-server 1.1)."""
        now = trio.current_time()
        idle_secs = [
            now - reader.last_taken_at for reader in self._open.values() if reader.waiting_bytes
        ]
        return {
            "stream_backlog_bytes": self._waiting_bytes,
            "open_stream_count": len(self._open),
            "generation_finished_stream_count": sum(
                reader.end is not None for reader in self._open.values()
            ),
            "longest_reader_idle_s": round(max(idle_secs, default=0.0), 3),
            "failed_stream_count": self._failed,
        }

    def _fail(self, delivery: Delivery) -> None:
        self._failed += 1
        waiting_bytes = delivery.waiting_bytes
        delivery.drop()
        message = f"the reader is too slow: {waiting_bytes} bytes waited for it"
        self._cut(delivery.request_id, RequestFailed(message, 503))
