"""The metrics of the process, and those of all workers as one exposition with a `worker` label.

Invariant: a worker whose text can't be parsed loses only its own samples, and is reported by
`omni_proxy_engine_metrics_up`. The merge runs in a thread: many workers send megabytes.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TextIO, cast

import trio
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_fd_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from omni_proxy import __version__
from omni_proxy.admin_api.serializers.discovery_report import discovery_metrics
from omni_proxy.admin_api.serializers.key_records import key_metrics
from omni_proxy.admin_api.serializers.readiness import Readiness
from omni_proxy.admin_api.services import Services
from omni_proxy.fleet.worker import KV_MODES
from omni_proxy.telemetry.metrics import SyncMetrics
from omni_proxy.telemetry.prometheus import counters, gauges, histograms, one, total
from omni_proxy.upstream_http.client import CallResult
from omni_proxy.weight_sync.protocol.trainer_group import SyncState


def of_program(services: Services, readiness: Readiness) -> Iterator[Metric]:
    yield from gauges("build_info", "The version; always 1", ("version",), [((__version__,), 1)])
    leaving = services.data_plane.draining or services.process.leaving()
    yield one("ready", "1 while /ready answers 200", not readiness.reason())
    yield one("leaving", "1 from the start of a shutdown", leaving)
    yield from _data_plane(services)
    yield from _config(services)
    yield from _policy(services.data_plane.policy.name, services.data_plane.policy.stats())
    yield from _pool_policies(services.data_plane.pool_stats())
    yield from _sessions(services)
    yield from _kv_events(services)
    yield from discovery_metrics(services.workers.discovery)
    yield from key_metrics(services.keys, services.config_store.config)
    yield from _cluster(services.cluster.status() if services.cluster else None)
    yield from _weights(services)
    yield from _itself(services)
    yield from ProcessCollector(registry=CollectorRegistry(auto_describe=False)).collect()


def _data_plane(services: Services) -> Iterator[Metric]:
    admission, counts = services.data_plane.admission(), services.data_plane.counts()
    in_flight = one("requests_in_flight", "Model requests being served", admission["inflight"])
    yield in_flight
    yield one("requests_in_flight_limit", "[server] max_inflight", admission["max_inflight"])
    yield one("queue_waiting", "Requests in the queue", admission.get("waiting", 0))
    refused = admission["rejected_total"]
    yield total(
        "requests_shed", "Requests refused because the queue was full or the wait too long", refused
    )
    yield one("connections", "Client connections that are open", _number(counts, "connections"))
    accepted = _number(counts, "accepted")
    yield total("connections_accepted", "Client connections that were accepted", accepted)
    broken = _number(counts, "failures")
    yield total("connection_failures", "Connections that ended by a fault of the proxy", broken)
    spans = _number(counts, "answers_across_versions")
    for name in ("responses_across_weights", "answers_across_weights"):  # the second: the old name
        yield total(name, "Responses during which weights changed", spans)
    yield from _processes(services.data_plane.rows(), "dataplane_process", "process")
    yield from _processes(services.data_plane.rows(), "door", "door")  # the old names


def _processes(rows: Sequence[Mapping[str, object]], prefix: str, label: str) -> Iterator[Metric]:
    """Metrics of each data-plane process, if there are several."""

    def of(key: str) -> list[tuple[tuple[str], float]]:
        return [((str(row["process"]),), _number(row, key)) for row in rows]

    labels = (label,)
    serving = [((str(row["process"]),), row["state"] == "serving") for row in rows]
    yield from gauges(f"{prefix}_up", "1 while a data-plane process serves", labels, serving)
    text = "Client connections of a data-plane process"
    yield from gauges(f"{prefix}_connections", text, labels, of("connections"))
    text = "Model requests in flight in a data-plane process"
    yield from gauges(f"{prefix}_requests_in_flight", text, labels, of("in_flight"))
    text = "Restarts of a data-plane process"
    yield from counters(f"{prefix}_restarts", text, labels, of("restarts"))


def _config(services: Services) -> Iterator[Metric]:
    config_store = services.config_store
    yield one("config_revision", "Changes applied since the start", config_store.revision)
    text = "Reloads of the configuration"
    yield from counters("config_reloads", text, ("outcome", "source"), config_store.reloads.items())
    last = config_store.last_reload
    well = last.get("outcome") != "refused" and "incomplete" not in last
    text = "0 if the last reload was refused, or was not applied completely"
    yield one("config_last_reload_successful", text, well)
    reloaded_at = datetime.fromisoformat(last["at"]).timestamp() if "at" in last else 0
    yield one("config_last_reload_timestamp_seconds", "Time of the last reload", reloaded_at)
    yield one(
        "state_saved", "0 while the state file can't be written", not config_store.state_error
    )


def _policy(name: str, stats: Mapping[str, object]) -> Iterator[Metric]:
    yield from gauges("policy_info", "The routing policy; always 1", ("policy",), [((name,), 1)])
    picks = [((branch,), count) for branch, count in _table(stats, "picks").items()]
    text = "Picks by the rule of the policy that chose the worker"
    yield from counters("policy_picks", text, ("branch",), picks)
    yield one("prefix_tree_bytes", "Size of texts in the prefix tree", _number(stats, "tree_size"))
    yield one(
        "prefix_tree_limit_bytes",
        "Limit of that size, max_tree_size",
        _number(stats, "max_tree_size"),
    )
    yield one("prefix_tree_nodes", "Nodes of that tree", _number(stats, "tree_nodes"))
    matched = _number(stats, "matched_ratio")
    yield one("prefix_match_ratio", "Share of all prompt text that was in the tree", matched)
    sticky = _table(stats, "sticky")
    yield one("sticky_sessions", "Sticky sessions that are kept", sticky.get("sessions", 0))
    results = ("kept", "begun", "moved", "rebalanced")
    sticky_rows = [((result,), sticky.get(result, 0)) for result in results]
    text = "Requests that stayed, began a session, or moved one"
    yield from counters("sticky_picks", text, ("result",), sticky_rows)
    finished = sticky.get("finished", 0)
    yield total("sticky_sessions_finished", "Sessions ended by /finish_session", finished)


def _pool_policies(pools: Mapping[str, Mapping[str, object]]) -> Iterator[Metric]:
    """Metrics of the prefill and the decode pool, each after its first request."""
    infos = [((pool, str(stats.get("name", ""))), 1) for pool, stats in pools.items()]
    yield from gauges("pool_policy_info", "The pool's policy; always 1", ("pool", "policy"), infos)
    picks = [
        ((pool, branch), count)
        for pool, stats in pools.items()
        for branch, count in _table(stats, "picks").items()
    ]
    text = "Picks by the rule of the pool's policy that chose the worker"
    yield from counters("pool_policy_picks", text, ("pool", "branch"), picks)
    sticky = [
        ((pool, result), _table(stats, "sticky")[result])
        for pool, stats in pools.items()
        for result in ("kept", "begun", "moved", "rebalanced")
        if "sticky" in stats
    ]
    text = "Legs that stayed, began a session of their pool, or moved one"
    yield from counters("pool_sticky_picks", text, ("pool", "result"), sticky)
    matched = [((pool,), _number(stats, "matched_ratio")) for pool, stats in pools.items()]
    text = "Share of the pool's prompt text that was in its tree"
    yield from gauges("pool_prefix_match_ratio", text, ("pool",), matched)


def _sessions(services: Services) -> Iterator[Metric]:
    """No sample while sessions are not sticky."""
    if services.config_store.config.routing.sticky_sessions:
        count = services.data_plane.session_count
        counts = [((worker.url,), count(worker)) for worker in services.workers.fleet.workers]
        text = "Sticky sessions of a worker"
        yield from gauges("worker_sessions", text, ("worker",), counts)


def _kv_events(services: Services) -> Iterator[Metric]:
    """Series of workers only for those whose events are followed."""
    counts, blocks = services.telemetry.kv_events
    yield one("kv_index_blocks", "Blocks that engines report as cached", blocks.blocks)
    yield one("kv_index_bytes", "Memory of that index, in each process", blocks.memory_bytes)
    workers = [worker for worker in services.workers.fleet.workers if worker.kv_mode != "off"]
    modes = [
        ((worker.url, mode), worker.kv_mode == mode) for worker in workers for mode in KV_MODES
    ]
    text = "How a worker's KV events are used; 1 for its current mode"
    yield from gauges("worker_kv_mode", text, ("worker", "mode"), modes)
    batches = [((worker.url,), count.batches) for worker, count in counts.items()]
    text = "Batches of KV events that arrived"
    yield from counters("worker_kv_event_batches", text, ("worker",), batches)
    unread = [((worker.url,), count.undecodable) for worker, count in counts.items()]
    text = "KV events that could not be decoded"
    yield from counters("worker_kv_events_undecodable", text, ("worker",), unread)


def _cluster(status: Mapping[str, Any] | None) -> Iterator[Metric]:
    """`status`: that of GET /status; no sample without [cluster].

    The label of a peer is its name in the configuration, without the part that changes with each
    start, so that restarts make no new series.
    """
    if status is None:
        return
    text = "1 while the store of the cluster is connected"
    yield one("cluster_store_connected", text, status["connected"])
    yield total("cluster_store_losses", "Connections to the store that broke", status["losses"])
    yield one("cluster_members", "Proxies of the cluster, this one included", status["members"])
    nodes = [(peer["member"].rpartition("/")[0], peer) for peer in status["peers"]]
    ages = [((node,), peer["age_secs"]) for node, peer in nodes]
    yield from gauges("cluster_peer_age_seconds", "Age of a peer's counts", ("peer",), ages)
    counts = [((node,), peer["in_flight"]) for node, peer in nodes]
    text = "Model requests in flight at a peer, from its last report"
    yield from gauges("cluster_peer_requests_in_flight", text, ("peer",), counts)


def _weights(services: Services) -> Iterator[Metric]:
    operations = services.weight_operations
    yield one("weight_epoch", "Epoch of the published weights", operations.journal.published.epoch)
    done = [
        ((path, "ok" if ok else "failed"), count)
        for (path, ok), count in operations.history.ended.items()
    ]
    text = "Operations that have ended"
    yield from counters("weight_operations", text, ("operation", "outcome"), done)
    secs = [((path,), spent) for path, spent in operations.history.spent_secs.items()]
    text = "Duration of operations, waiting included"
    yield from counters("weight_operation_seconds", text, ("operation",), secs)
    yield one("weight_operations_waiting", "Operations that wait in the queue", operations.waiting)
    uncertain = len(operations.journal.uncertain)
    yield one("workers_uncertain", "Workers with unverified weights", uncertain)
    pauses = operations.journal.pauses()
    yield one("workers_paused", "Workers with a paused engine", len(pauses))
    paused_since = [((url,), _timestamp(pause.at)) for url, pause in pauses.items()]
    text = "Time at which the engine was paused; no sample if it is not"
    yield from gauges("worker_paused_timestamp_seconds", text, ("worker",), paused_since)
    yield from _syncs(operations.sync.lifecycle.sync.state, operations.sync.lifecycle.meters)


def _syncs(now: SyncState, meters: SyncMetrics) -> Iterator[Metric]:
    states = [((state.value,), state is now) for state in SyncState]
    yield from gauges("weight_sync_state", "1 for the current state", ("state",), states)
    labels = ("phase", "result")
    text = "Steps of grouped syncs that have ended"
    yield from counters("weight_sync_steps", text, labels, meters.ended.items())
    secs = [((phase,), spent) for phase, spent in meters.secs.items()]
    yield from counters("weight_sync_seconds", "Duration of these steps", ("phase",), secs)
    aborts = [((cause,), count) for cause, count in meters.aborts.items()]
    text = "Grouped syncs that were ended from outside"
    yield from counters("weight_sync_aborts", text, ("why",), aborts)
    yield total("weight_sync_bytes", "Bytes that participants of groups received", meters.nbytes)


def _itself(services: Services) -> Iterator[Metric]:
    ticker = services.telemetry.instruments.ticker
    text = "How late the event loop wakes a task"
    yield from histograms("event_loop_lag_seconds", text, (), [((), ticker.lag)])
    watchdog = services.data_plane.watchdog()
    text = "Times that an event loop was blocked for a second or more"
    yield total("event_loop_stalls", text, _number(watchdog, "stalls"))
    text = "The longest time that a task waited while another one computed"
    yield one("event_loop_longest_turn_seconds", text, _number(watchdog, "longest_turn_ms") / 1000)
    lost = [
        ((name, reason), count)
        for name, log in services.telemetry.instruments.logs.items()
        for reason, count in (("too_fast", log.dropped), ("unwritable", log.failed))
    ]
    text = "Lines of a log that were not written"
    yield from counters("log_lines_lost", text, ("log", "reason"), lost)
    spans = services.telemetry.instruments.spans
    counts = [("exported", spans.exported), ("failed", spans.failed), ("dropped", spans.dropped)]
    text = "Spans for the trace collector"
    yield from counters("spans", text, ("result",), [((name,), count) for name, count in counts])
    restarts = [
        ((str(row["name"]),), _number(row, "restarts")) for row in services.process.supervisors()
    ]
    yield from counters(
        "task_restarts", "Restarts of a service other than the data plane", ("task",), restarts
    )


def _timestamp(at: str) -> float:
    """Unix time; 0 if unknown."""
    return datetime.fromisoformat(at).timestamp() if at else 0


def _number(stats: Mapping[str, object], key: str) -> float:
    value = stats.get(key)
    return value if isinstance(value, int | float) else 0


def _table(stats: Mapping[str, object], key: str) -> dict[str, int]:
    value = stats.get(key)
    return value if isinstance(value, dict) else {}


UP: Final = "omni_proxy_engine_metrics_up"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TOTAL: Final = "_total"
# Limits for one worker; a text beyond one of them counts as unreadable. The parser's time grows
# with the square of a line's length.
MAX_FAMILIES: Final = 1000
MAX_LINE_CHARS: Final = 8192
READ_SECS: Final = 2.0  # of CPU time
_KEPT_TYPES: Final = ("counter", "gauge", "histogram", "summary")


def prefers_openmetrics(accept: str) -> bool:
    """Whether a scraper with this Accept field prefers OpenMetrics to the text format, which is the
    default for scrapers that do not name OpenMetrics (RFC 9110 12.5.1)."""
    best = {"openmetrics": 0.0, "text": 0.0}
    for item in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in item.split(";"))
        options = dict(part.replace(" ", "").partition("=")[::2] for part in parameters)
        try:
            share = float(options.get("q", "1"))
        except ValueError:
            continue
        version = options.get("version", "1.0.0").strip('"')
        if media_type == "application/openmetrics-text" and version in ("1.0.0", "0.0.1"):
            best["openmetrics"] = max(best["openmetrics"], share)
        elif media_type == "text/plain":
            best["text"] = max(best["text"], share)
    return best["openmetrics"] > 0 and best["openmetrics"] >= best["text"]


async def merge_metrics(results: Sequence[CallResult]) -> bytes:
    return await trio.to_thread.run_sync(_merged, results)


def _merged(results: Sequence[CallResult]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(results))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, results: Sequence[CallResult]) -> None:
        self._results = results

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        up = GaugeMetricFamily(
            UP,
            "1 if the worker's own metrics could be read",
            labels=["worker"],
        )
        for result in self._results:
            parsed = _families(result)
            up.add_metric([result.worker.url], 0 if parsed is None else 1)
            for family in parsed or ():
                name = family.name + TOTAL * (family.type == "counter")
                if name == UP:
                    continue
                family_so_far = families.setdefault(
                    name, Metric(family.name, family.documentation, family.type)
                )
                if family_so_far.type != family.type:  # as between two versions of an engine
                    family_so_far.name, family_so_far.type = name, "unknown"
                family_so_far.samples += _labelled(family, result.worker.url)
        yield up
        yield from families.values()


def _families(result: CallResult) -> list[Metric] | None:
    """None for an unreadable reply."""
    if not result.ok:
        return None
    try:
        parsed = _read(result.body.decode())
    except (ValueError, KeyError, IndexError, TypeError):  # raised by the parser for invalid text
        return None
    for family in parsed:
        if family.type not in _KEPT_TYPES:
            family.type = "unknown"
    times = [float(s.timestamp or 0) for family in parsed for s in family.samples]
    return parsed if all(map(math.isfinite, times)) else None  # other times can't be written


def _read(text: str) -> list[Metric]:
    """Raises ValueError beyond a limit, and the parser's errors."""
    parsed, names = [], set()
    for family in text_fd_to_metric_families(cast("TextIO", _lines(text))):
        names.add(family.name)
        if len(names) > MAX_FAMILIES:
            raise ValueError(f"more than {MAX_FAMILIES} families")
        parsed.append(family)
    return parsed


def _lines(text: str) -> Iterator[str]:
    """The lines with single blanks in their comments. Raises ValueError beyond a limit.

    The parser and the writer rename every counter so that it ends in `_total`, and the writer adds
    suffixes for some types. To keep the workers' names, a counter without that suffix gets no type,
    and neither does a type that this format lacks.
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
    """The samples with the label `worker`. A worker's own label of that name is renamed, as
    Prometheus does, to `exported_worker`."""
    for sample in family.samples:
        labels = {"exported_worker" if k == "worker" else k: v for k, v in sample.labels.items()}
        yield sample._replace(labels={**labels, "worker": worker})
