"""The sources of `[[discover]]`: their rows at GET /status, and their metrics.

Must not change anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from prometheus_client import Metric

from omni_proxy.admin_api.services import DiscoveryView
from omni_proxy.discovery.endpoints import SourceReport
from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.prometheus import counters, gauges

MAX_PROBLEMS: Final = 20  # most unusable pods that are shown


def discovery_rows(discovery: DiscoveryView) -> list[dict[str, object]]:
    """`state`: starting (no answer yet), synced, failing (no answer so far), or stale (it fails,
    and the workers are those of the last list). `ignored`: unusable endpoints, with the reason.
    """
    now = datetime.now(UTC)
    return [_row(report, now) for report in discovery.reports()]


def _row(report: SourceReport, now: datetime) -> dict[str, object]:
    status = report.status
    last_event = status.last_event_at
    return {
        "name": status.name,
        "kind": status.kind,
        "state": status.state,
        "last_list": status.listed_at.isoformat() if status.listed_at else None,
        "last_event": last_event.isoformat() if last_event else None,
        "age_secs": round((now - last_event).total_seconds(), 3) if last_event else None,
        "error": status.error or None,
        "failing_since": status.failing_since.isoformat() if status.failing_since else None,
        "failures": status.failures,
        "lists": status.lists,
        "events": dict(status.events),
        "workers": report.workers,
        "ignored": dict(list(report.problems.items())[:MAX_PROBLEMS]),
    }


def discovered_record(worker: Worker) -> dict[str, object] | None:
    """The source and pod of a discovered worker; None for other workers."""
    discovered = worker.discovered
    if discovered is None:
        return None
    return {
        "source": discovered.source,
        "uid": discovered.uid,
        "namespace": discovered.namespace or None,
        "pod": discovered.pod or None,
    }


def discovery_metrics(discovery: DiscoveryView) -> Iterator[Metric]:
    """No sample without [[discover]]."""
    reports = discovery.reports()
    now = datetime.now(UTC)
    source = ("source",)

    def of(values: Sequence[float]) -> list[tuple[tuple[str], float]]:
        pairs = zip(reports, values, strict=True)
        return [((report.status.name,), value) for report, value in pairs]

    text = "1 while the source is in sync, 0 while requests to it fail"
    up = of([report.status.state == "synced" for report in reports])
    yield from gauges("discovery_up", text, source, up)
    last_events = [(report.status.name, report.status.last_event_at) for report in reports]
    ages = [
        ((name,), (now - event_at).total_seconds())
        for name, event_at in last_events
        if event_at is not None
    ]
    text = "Time since the last list, event, bookmark or answer of the source"
    yield from gauges("discovery_age_seconds", text, source, ages)
    workers = [
        ((report.status.name, state), count)
        for report in reports
        for state, count in report.workers.items()
    ]
    text = "Discovered workers, by their discovery state"
    yield from gauges("discovery_workers", text, ("source", "state"), workers)
    ignored = of([len(report.problems) for report in reports])
    yield from gauges("discovery_ignored", "Endpoints that can't be used", source, ignored)
    lists = of([report.status.lists for report in reports])
    yield from counters("discovery_lists", "Whole lists and answers read", source, lists)
    failures = of([report.status.failures for report in reports])
    yield from counters("discovery_failures", "Failed requests to the source", source, failures)
    events = [
        ((report.status.name, kind), count)
        for report in reports
        for kind, count in report.status.events.items()
    ]
    text = "Events of watches"
    yield from counters("discovery_events", text, ("source", "type"), events)
