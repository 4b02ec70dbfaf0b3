"""Counts of data-plane processes, summed by the main process, equal those of a single process."""

import msgspec

from omni_proxy.dataplane.exchange.request_trace import RequestTrace
from omni_proxy.fleet.worker import worker_state
from omni_proxy.multiprocess.ipc.messages import MetricsEvent
from omni_proxy.multiprocess.metrics_delta import PHASES, MetricsDelta, merge_metrics
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet
from omni_proxy.multiprocess.shared_memory.worker_counters import SharedCounters
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.fleet.entries import NOW, entry, fleet_of
from tests.telemetry.ends import ended, refused, whole


def fleets():
    """The main process's fleet, and that of a data-plane process that follows it."""
    main = fleet_of(entry("a"), entry("b"))
    rows = [
        worker_state(worker, serial, serial) for serial, worker in enumerate(main.workers, start=1)
    ]
    follower = ReplicatedFleet(SharedCounters.create(), 1, lambda: 0.0, lambda message: None)
    follower.follow(rows, NOW)
    return main, follower


def exchanges(fleet):
    a, b = fleet.workers
    yield ended(a), a
    yield ended(a, outcome="cut_by_proxy", ended_by="proxy"), a
    yield ended(b, status=502, outcome="upstream_error", model="m"), b
    tried = [(a, "connect_failure"), (b, "503")]
    yield ended(b, failed_attempts=tried, attempts=3, queued_secs=0.3, connect_secs=0.1), b
    usage = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 2}}'
    yield ended(a, last_chunk=usage), a
    yield refused(), None
    for secs in (0.1, 30.0):
        yield whole(a, secs, model="m"), a
    yield whole(b, response_head_at=100.15), b


def values_of(fleet, meters, recent):
    names = {worker: worker.url for worker in fleet.workers} | {None: ""}
    cells = {
        (route, names[worker]): (
            cell.ends, cell.total.counts, cell.first.counts, cell.between.counts,
            round(cell.total.sum, 6), round(cell.first.sum, 6),
            cell.bytes_in, cell.bytes_out, cell.chunks, dict(cell.tokens),
            cell.cached_tokens, cell.prompt_tokens,
        )
        for (route, worker), cell in meters.series.items()
    }  # fmt: skip
    phases = {
        route: [getattr(each, name).counts for name in PHASES]
        for route, each in meters.phases.items()
    }
    tries = {(names[worker], cause): n for (worker, cause), n in meters.failed_attempts.items()}
    tries |= {names[worker]: counts for worker, counts in meters.cached_tokens.items()}
    slots = {names[worker]: slot.requests for worker, slot in recent.sums.items()}
    current = recent.current_second()
    second = (current.requests, current.errors, current.firsts)
    return cells, phases, tries, meters.retries, slots, second, recent.ends()


def without_overhead(values):
    """The proxy's overhead is measured with the real clock, so only its count is compared."""
    cells, phases, *rest = values
    return cells, {route: len(each) for route, each in phases.items()}, *rest


def test_the_metrics_of_two_processes_add_up_to_those_of_one():
    main, follower = fleets()
    recent, dataplane = RecentWindow(), MetricsDelta(follower)
    single = Metrics(main, recent)
    for exchange, worker in exchanges(main):
        single.record(exchange, worker)
        if worker is not None:
            single.count_cached(worker, 9, 4)
    summed_recent = RecentWindow()
    summed = Metrics(main, summed_recent)
    workers = dict(enumerate(main.workers, start=1))
    for exchange, worker in exchanges(follower):
        dataplane.record(exchange, worker)
        if worker is not None:
            dataplane.count_cached(worker, 9, 4)
        delta = msgspec.msgpack.decode(msgspec.msgpack.encode(dataplane.take()), type=MetricsEvent)
        merge_metrics(delta, summed, summed_recent, workers.get)
    remaining = dataplane.take()
    assert not remaining.series
    assert not remaining.seconds
    expected = without_overhead(values_of(main, single, recent))
    assert without_overhead(values_of(main, summed, summed_recent)) == expected
    assert expected[3] == 2


def test_each_gap_of_a_long_stream_is_in_exactly_one_delta():
    main, follower = fleets()
    meters, recent, dataplane = (
        Metrics(main, RecentWindow()),
        RecentWindow(),
        MetricsDelta(follower),
    )
    workers = dict(enumerate(main.workers, start=1))
    exchange = ended()
    exchange.worker = follower.workers[0]
    path = exchange.route.path
    gaps = dataplane.gap_histogram(exchange)
    merge_metrics(dataplane.take(), meters, recent, workers.get)
    for secs in (0.02, 0.3, 4.0):
        gaps.observe(secs)
        merge_metrics(dataplane.take(), meters, recent, workers.get)
        dataplane.record(ended(exchange.worker), exchange.worker)  # another exchange ends meanwhile
        merge_metrics(dataplane.take(), meters, recent, workers.get)
    between = meters.series[path, main.workers[0]].between
    assert (sum(between.counts), round(between.sum, 6)) == (3, 4.32)
    assert not dataplane.take().series


def test_gaps_of_a_removed_worker_are_dropped():
    main, follower = fleets()
    dataplane = MetricsDelta(follower)
    exchange = ended()
    exchange.worker = follower.workers[0]
    gaps = dataplane.gap_histogram(exchange)
    follower.follow([worker_state(main.workers[1], 2, 2)], NOW)
    gaps.observe(0.1)
    assert not dataplane.take().series


def test_counts_of_workers_are_merged_and_those_of_removed_workers_dropped():
    main, follower = fleets()
    meters, recent = Metrics(main, RecentWindow()), RecentWindow()
    dataplane = MetricsDelta(follower)
    for worker in follower.workers:
        worker.add_counts("generation", routed=3, failed=1)
    delta = dataplane.take()
    merge_metrics(delta, meters, recent, {1: main.workers[0]}.get)
    assert (main.workers[0].routed["generation"], main.workers[0].failed["generation"]) == (3, 1)
    assert not main.workers[1].routed
    assert not dataplane.take().worker_counts


def test_exemplars_of_processes_reach_the_main_process():
    main, follower = fleets()
    delta, meters, recent = (
        MetricsDelta(follower),
        Metrics(main, RecentWindow()),
        RecentWindow(),
    )
    worker = follower.workers[0]
    delta.note_trace(ended(worker, trace=RequestTrace(b"0" * 31 + b"1")), worker)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(delta.take()), type=MetricsEvent)
    merge_metrics(sent, meters, recent, dict(enumerate(main.workers, start=1)).get)
    rows = list(meters.exemplars.rows())
    assert {key for key, *_ in rows} == {("/v1/chat/completions", main.workers[0])}
    assert sorted(round(noted.secs, 3) for *_, noted in rows) == [0.2, 1.1]
    assert list(delta.exemplars.rows()) == []
