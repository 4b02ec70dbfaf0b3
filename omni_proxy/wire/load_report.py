"""Load reports of engines: from a response header, from metrics, from JSON.

    vLLM, Triton    endpoint-load-metrics: JSON {"named_metrics": {...}}, or TEXT named_metrics.x=1,
                    if the request has endpoint-load-metrics-format
    /metrics        a series for each engine: label `engine` (vLLM) or `dp_rank` (SGLang)
    /v1/loads       SGLang: {"loads": [{"dp_rank", "num_waiting_reqs", "token_usage"}]}

Invariant: a value that is not a finite number of at least 0, or a usage above 1, counts as not
reported. Pure. Raises for no input. Sources: note:real-engines 5.3, note:features 10, captures of
vLLM 0.32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from omni_proxy.shared.decoding import MALFORMED

LOAD_NAME: Final = b"endpoint-load-metrics"
LOAD_FORMAT_NAME: Final = b"endpoint-load-metrics-format"
LOAD_FORMAT_LINE: Final = LOAD_FORMAT_NAME + b": JSON\r\n"
MAX_VALUE_BYTES: Final = 4096
MAX_RANKS: Final = 1024  # engines behind one URL; also the maximum of the key `ranks`

_FIELD: Final = b"\r\n" + LOAD_NAME + b":"
_ANY_CASE: Final = re.compile(rb"\r\n(?i:endpoint-load-metrics)[ \t]*:([^\r\n]*)(?=\r\n|\Z)")
_AS_VLLM: Final = b" JSON "  # prefix of the value as vLLM writes it
_TEXT_PREFIX: Final = "named_metrics."
WAITING: Final = "num_requests_waiting"
KV_USAGE: Final = "kv_cache_usage_perc"

# Names of series, by engine: vLLM, SGLang (two spellings), TensorRT-LLM.
_WAITING_SERIES: Final = (
    b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"sglang_num_queue_reqs",
    b"trtllm_num_requests_waiting",
)  # fmt: skip
_KV_SERIES: Final = (
    b"vllm:kv_cache_usage_perc", b"sglang:token_usage", b"sglang_token_usage",
    b"trtllm_kv_cache_utilization",
)  # fmt: skip
_SERIES: Final = re.compile(
    rb"^(%b)(?:\{([^}\n]*)\})?[ \t]+([^ \t\n]+)"
    % b"|".join(map(re.escape, (*_WAITING_SERIES, *_KV_SERIES))),
    re.MULTILINE,
)
_ENGINE_LABEL: Final = re.compile(rb'(?:^|,)[ \t]*(?:engine|dp_rank)="(\d{1,4})"')


class LoadReport(NamedTuple):
    """`waiting`: requests in the engine's queue. `kv_usage`: the share of its KV cache in use, 0 to
    1. None: not reported."""

    waiting: float | None = None
    kv_usage: float | None = None


NO_REPORT: Final = LoadReport()


class EngineLoad(NamedTuple):
    """A report, and the time at which it arrived, in seconds of the monotonic clock."""

    report: LoadReport
    at: float


def split_load_field(head: bytes) -> tuple[bytes, bytes]:
    """A response's head without the field, and the field's value. Finds only vLLM's spelling;
    b"" if the head does not have it."""
    before, name, after = head.partition(_FIELD)
    value, end, rest = after.partition(b"\r\n")
    return (before + end + rest, value) if name else (head, b"")


def find_load_field(head: bytes) -> tuple[bytes, bytes]:
    """As `split_load_field`, with any spelling. If the field is repeated, all are removed and the
    first value is returned."""
    match = _ANY_CASE.search(head)
    return (_ANY_CASE.sub(b"", head), match[1]) if match is not None else (head, b"")


class _NamedMetrics(msgspec.Struct, frozen=True):
    num_requests_waiting: float | None = None
    kv_cache_usage_perc: float | None = None


class _OrcaReport(msgspec.Struct, frozen=True):
    named_metrics: _NamedMetrics = _NamedMetrics()


_decode: Final = msgspec.json.Decoder(_OrcaReport).decode


def load_of_header(value: bytes) -> LoadReport:
    """The report in the field's value."""
    if len(value) > MAX_VALUE_BYTES:
        return NO_REPORT
    text = value.removeprefix(_AS_VLLM)
    if len(text) == len(value):
        form, _, text = value.strip().partition(b" ")
        if form.upper() == b"TEXT":
            return _load_of_text(text.decode("latin-1"))
        if form.upper() != b"JSON":
            return NO_REPORT
    try:
        metrics = _decode(text).named_metrics
    except MALFORMED:
        return NO_REPORT
    return _report(metrics.num_requests_waiting, metrics.kv_cache_usage_perc)


def _load_of_text(text: str) -> LoadReport:
    """`named_metrics.num_requests_waiting=0.0, named_metrics.kv_cache_usage_perc=0.5`."""
    metrics: dict[str, float | None] = {}
    for part in text.split(","):
        name, _, value = part.strip().removeprefix(_TEXT_PREFIX).partition("=")
        metrics[name] = _number(value)
    return _report(metrics.get(WAITING), metrics.get(KV_USAGE))


def loads_of_metrics(text: bytes) -> dict[int, LoadReport]:
    """Reports by engine number, 0 if a series has none; {} if no series is known. For several
    series with the same number, as of tensor-parallel ranks, the largest value is used."""
    loads: dict[int, LoadReport] = {}
    for name, labels, value in _SERIES.findall(text):
        label = _ENGINE_LABEL.search(labels)
        engine = int(label[1]) if label is not None else 0
        number = _number(value.decode("latin-1"))
        report = _report(number, None) if name in _WAITING_SERIES else _report(None, number)
        if report != NO_REPORT and engine < MAX_RANKS:
            loads[engine] = _larger(loads.get(engine, NO_REPORT), report)
    return loads


def pieces_of(text: bytes, size: int = 1 << 18) -> Iterator[bytes]:
    """Split a long text into pieces of about `size` bytes of complete lines, for
    `loads_of_metrics`."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + size)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def add_loads(loads: dict[int, LoadReport], more: Mapping[int, LoadReport]) -> None:
    """Merge `more`, the reports in another piece of the same text, into `loads`."""
    for engine, report in more.items():
        loads[engine] = _larger(loads.get(engine, NO_REPORT), report)


def _larger(one: LoadReport, other: LoadReport) -> LoadReport:
    waiting = [value for value in (one.waiting, other.waiting) if value is not None]
    usage = [value for value in (one.kv_usage, other.kv_usage) if value is not None]
    return LoadReport(max(waiting, default=None), max(usage, default=None))


def loads_of_records(body: object) -> dict[int, LoadReport]:
    """Reports in the parsed JSON of /v1/loads, by rank; {} if it has no valid record."""
    records = body.get("loads") if isinstance(body, dict) else None
    if not isinstance(records, list) or len(records) > MAX_RANKS:
        return {}
    loads: dict[int, LoadReport] = {}
    for place, record in enumerate(records):
        # An omni-proxy reports its own requests in flight for engines that report nothing.
        if not isinstance(record, dict) or record.get("source") == "proxy":
            continue
        rank = record.get("dp_rank")
        if not isinstance(rank, int) or not 0 <= rank < MAX_RANKS or rank in loads:
            rank = place
        waiting, usage = record.get("num_waiting_reqs"), record.get("token_usage")
        loads[rank] = _report(_as_number(waiting), _as_number(usage))
    return {rank: report for rank, report in loads.items() if report != NO_REPORT}


def total_load(loads: Mapping[int, LoadReport]) -> LoadReport:
    """The load of several engines behind one URL: the sum of `waiting`, the mean of `kv_usage`."""
    waiting = [load.waiting for load in loads.values() if load.waiting is not None]
    usage = [load.kv_usage for load in loads.values() if load.kv_usage is not None]
    return LoadReport(sum(waiting) if waiting else None, sum(usage) / len(usage) if usage else None)


def _report(waiting: float | None, kv_usage: float | None) -> LoadReport:
    return LoadReport(
        waiting if waiting is not None and 0 <= waiting < math.inf else None,
        kv_usage if kv_usage is not None and 0 <= kv_usage <= 1 else None,
    )


def _as_number(value: object) -> float | None:
    """None if it is no number, or a JSON number that is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
