"""The metrics of all workers as one exposition: the same families, with a `worker` label.

Invariant: a worker whose text can't be parsed costs its own samples only, and shows in
`omni_proxy_engine_metrics_up`. The merge runs in a thread: 500 workers send megabytes.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TextIO, cast

import trio
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_fd_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from omni_proxy.upstream_http.client import CallResult

UP: Final = "omni_proxy_engine_metrics_up"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
TOTAL: Final = "_total"
# Of one worker; past one of these its text counts as unreadable. The reader we use takes time by
# the square of a line's length.
MAX_FAMILIES: Final = 1000
MAX_LINE_CHARS: Final = 8192
READ_SECS: Final = 2.0  # of CPU: 50,000 samples
_KEPT_TYPES: Final = ("counter", "gauge", "histogram", "summary")


async def merge_metrics(outcomes: Sequence[CallResult]) -> bytes:
    return await trio.to_thread.run_sync(_merged, outcomes)


def _merged(outcomes: Sequence[CallResult]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(outcomes))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, outcomes: Sequence[CallResult]) -> None:
        self._outcomes = outcomes

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        up = GaugeMetricFamily(
            UP,
            "1 where the worker's own metrics could be read",
            labels=["worker"],
        )
        for outcome in self._outcomes:
            parsed = _families(outcome)
            up.add_metric([outcome.worker.url], 0 if parsed is None else 1)
            for family in parsed or ():
                name = family.name + TOTAL * (family.type == "counter")
                if name == UP:
                    continue
                family_so_far = families.setdefault(
                    name, Metric(family.name, family.documentation, family.type)
                )
                if family_so_far.type != family.type:  # as between two versions of an engine
                    family_so_far.name, family_so_far.type = name, "unknown"
                family_so_far.samples += _labelled(family, outcome.worker.url)
        yield up
        yield from families.values()


def _families(outcome: CallResult) -> list[Metric] | None:
    """None for an unreadable reply."""
    if not outcome.ok:
        return None
    try:
        parsed = _read(outcome.body.decode())
    except (ValueError, KeyError, IndexError, TypeError):  # what its parser raises for junk
        return None
    for family in parsed:
        if family.type not in _KEPT_TYPES:
            family.type = "unknown"
    times = [float(s.timestamp or 0) for family in parsed for s in family.samples]
    return parsed if all(map(math.isfinite, times)) else None  # no such time can be written


def _read(text: str) -> list[Metric]:
    """Raises ValueError past a bound, and what the reader raises."""
    parsed, names = [], set()
    for family in text_fd_to_metric_families(cast("TextIO", _lines(text))):
        names.add(family.name)
        if len(names) > MAX_FAMILIES:
            raise ValueError(f"more than {MAX_FAMILIES} families")
        parsed.append(family)
    return parsed


def _lines(text: str) -> Iterator[str]:
    """The lines with single blanks in their comments. Raises ValueError past a bound.

    The reader and the writer give every counter a name that ends in `_total`, and the writer gives
    some types endings of their own. The workers' names stay: a counter of another name is read and
    written without a type, as are types that this format does not have.
    """
    until = time.thread_time() + READ_SECS
    for line in io.StringIO(text):
        if len(line) > MAX_LINE_CHARS:
            raise ValueError(f"a line of more than {MAX_LINE_CHARS} characters")
        if time.thread_time() > until:
            raise ValueError(f"more than can be read in {READ_SECS:g} s")
        if line.lstrip()[:1] != "#":
            yield line
            continue
        parts = line.split(None, 3)
        if parts[1:2] == ["TYPE"] and parts[3:] and parts[3].strip() == "counter":
            parts[3] = "counter" if parts[2].endswith(TOTAL) else "unknown"
        yield " ".join(parts)


def _labelled(family: Metric, worker: str) -> Iterable[Sample]:
    """A label of that name which is the worker's own goes by the name that Prometheus gives it."""
    for sample in family.samples:
        labels = {"exported_worker" if k == "worker" else k: v for k, v in sample.labels.items()}
        yield sample._replace(labels={**labels, "worker": worker})
