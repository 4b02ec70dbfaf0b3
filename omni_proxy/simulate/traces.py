"""Reads request traces: Mooncake's `.jsonl`, Azure's `.csv`, and the proxy's own route log.

A file may be compressed with gzip. Invariant: every line is checked, and bad input raises
TraceError with the file and the line; only blank lines are skipped. Sources: Mooncake's trace
release (FAST '25): `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of blocks of 512
tokens. Azure LLM inference trace 2023: `TIMESTAMP,ContextTokens,GeneratedTokens`. A route log has
bytes instead of tokens: these are estimated by `BYTES_PER_TOKEN` and `BYTES_PER_EVENT`.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from omni_proxy.routing.policies.cache_cost import BYTES_PER_TOKEN
from omni_proxy.simulate.workload import OpenLoop, Request, Workload

BYTES_PER_EVENT: Final = 240  # of an OpenAI stream: one token and the JSON around it
GZIP_MAGIC: Final = b"\x1f\x8b"
CSV_HEADER: Final = b"TIMESTAMP,ContextTokens,GeneratedTokens"
MAX_TOKENS: Final = 100_000_000
MAX_DAYS: Final = 30  # between two requests of a trace

Line = TypeVar("Line")


class TraceError(Exception):
    """The message is `FILE:LINE: reason`."""


class _MooncakeLine(msgspec.Struct, gc=False):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class _RouteLine(msgspec.Struct, gc=False):
    timestamp: datetime
    duration_s: float
    request_bytes: int
    response_bytes: int
    stream: bool = False
    completed: bool = False
    status_code: int | None = None
    model: str | None = None
    traffic: str | None = None


def read_trace(path: Path, limit: int | None = None) -> Workload:
    """The first `limit` requests of a trace. Raises TraceError."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".csv"):
        return OpenLoop(_read_csv(path, limit))
    if name.endswith(".jsonl"):
        return OpenLoop(_from_zero(_read_lines(path, limit, _mooncake_request)))
    raise TraceError(f"{path}: expected a name that ends with .jsonl or .csv, or these with .gz")


def read_route_log(path: Path, limit: int | None = None) -> Workload:
    """The completed generation requests of a route log. Raises TraceError."""
    requests = _read_lines(path, limit, _routed_request)
    return OpenLoop(_from_zero(requests))


def _read_lines(
    path: Path, limit: int | None, read: Callable[[bytes], Request | None]
) -> list[Request]:
    return _read_all(path, _lines(path), limit, read)


def _read_all(
    path: Path,
    lines: Iterable[tuple[int, bytes]],
    limit: int | None,
    read: Callable[[bytes], Request | None],
) -> list[Request]:
    requests: list[Request] = []
    for number, line in lines:
        if limit is not None and len(requests) >= limit:
            break
        try:
            request = read(line)
            if request is not None:
                _check_time(request, requests)
        except (msgspec.ValidationError, msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"{path}:{number}: {error}") from None
        if request is not None:
            requests.append(request)
    if not requests:
        raise TraceError(f"{path}:1: the file has no requests")
    return requests


def _check_time(request: Request, before: Sequence[Request]) -> None:
    """Raises ValueError if times are too far apart, because they are probably in another unit:
    years of health checks would be simulated."""
    days = abs(request.at - before[0].at) / 86400 if before else 0.0
    if days > MAX_DAYS:
        raise ValueError(
            f"its time is {days:.6g} days from that of the first request, at most {MAX_DAYS} are "
            "simulated; in .jsonl `timestamp` is in milliseconds"
        )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(_content(path).splitlines(), 1):
        if line.strip():
            yield number, line


def _content(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except EOFError:
        raise TraceError(f"{path}: the compressed file is incomplete") from None
    except zlib.error as error:
        raise TraceError(f"{path}: the compressed file is damaged: {error}") from None


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode
_decode_route = msgspec.json.Decoder(_RouteLine).decode


def _mooncake_request(line: bytes) -> Request:
    row = _decode_mooncake(line)
    request = Request(
        row.timestamp / 1000, _tokens("input_length", row.input_length),
        _tokens("output_length", row.output_length), row.hash_ids,
    )  # fmt: skip
    needed = -(-request.input_tokens // request.block_tokens)
    if row.hash_ids and len(row.hash_ids) != needed:
        raise ValueError(
            f"{len(row.hash_ids)} hash_ids for {request.input_tokens} tokens, expected {needed}: "
            f"one for each block of {request.block_tokens}"
        )
    return request


def _routed_request(line: bytes) -> Request | None:
    row = _decode_route(line)
    if not row.completed or row.status_code != 200 or row.traffic != "generation":
        return None
    per_token = BYTES_PER_EVENT if row.stream else BYTES_PER_TOKEN
    return Request(
        row.timestamp.timestamp() - row.duration_s,
        max(1, row.request_bytes // BYTES_PER_TOKEN),
        max(1, row.response_bytes // per_token),
        model=row.model or "",
    )


def _read_csv(path: Path, limit: int | None) -> list[Request]:
    lines = iter(_lines(path))
    _, header = next(lines, (1, b""))
    if header.strip() != CSV_HEADER:
        raise TraceError(f"{path}:1: expected the header {CSV_HEADER.decode()}")
    return _from_zero(_read_all(path, lines, limit, _csv_request))


def _csv_request(line: bytes) -> Request:
    fields = line.decode().split(",")
    if len(fields) != CSV_HEADER.count(b",") + 1:
        raise ValueError(f"expected {CSV_HEADER.count(b',') + 1} fields, found {len(fields)}")
    try:
        timestamp = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", fields[0]))
    except ValueError:
        expected = "expected one like 2023-11-16 18:17:03.98"
        raise ValueError(f"TIMESTAMP is {fields[0]!r:.60}, {expected}") from None
    prompt, answer = int(fields[1]), int(fields[2])
    return Request(
        timestamp.timestamp(), _tokens("ContextTokens", prompt), _tokens("GeneratedTokens", answer)
    )


def _tokens(name: str, value: int) -> int:
    """The number of tokens; 0, which some traces have, becomes 1. Raises ValueError."""
    if not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} is {value}, expected 0 to {MAX_TOKENS}")
    return max(1, value)


def _from_zero(requests: list[Request]) -> list[Request]:
    """Make times relative to the first request."""
    first = min((request.at for request in requests), default=0.0)
    for request in requests:
        request.at -= first
    return requests
