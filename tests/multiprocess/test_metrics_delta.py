"""What is counted in data-plane processes and summed by the main process is what one process would have counted."""

import msgspec

from omni_proxy.dataplane.request_trace import RequestTrace
from omni_proxy.fleet.worker import worker_state
from omni_proxy.multiprocess.ipc import MetricsEvent
from omni_proxy.multiprocess.metrics_delta import PHASES, MetricsDelta, merge_metrics
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet
from omni_proxy.multiprocess.shared_memory.worker_counters import SharedCounters
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.fleet.entries import NOW, entry, fleet_of
from tests.telemetry.ends import ended, refused, whole


def fleets():
    """One process's, and that of a dataplane beside it."""
    whole = fleet_of(entry("a"), entry("b"))
    rows = [
        worker_state(worker, serial, serial) for serial, worker in enumerate(whole.workers, start=1)
    ]
    follows = ReplicatedFleet(SharedCounters.create(), 1, lambda: 0.0, lambda message: None)
    follows.follow(rows, NOW)
    return whole, follows


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


def shown(meters, recent):
    names = {worker: worker.url for worker in meters._fleet.workers} | {None: ""}
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
    so_far = recent.current_second()
    second = (so_far.requests, so_far.errors, so_far.firsts)
    return cells, phases, tries, meters.retries, slots, second, recent.ends()


def overhead_aside(shown):
    """It is measured with the clock of the moment."""
    cells, phases, *rest = shown
    return cells, {route: len(each) for route, each in phases.items()}, *rest


def test_the_metrics_of_two_processes_add_up_to_those_of_one():
    whole, follows = fleets()
    recent, dataplane = RecentWindow(), MetricsDelta(follows)
    one = Metrics(whole, recent)
    for exchange, worker in exchanges(whole):
        one.record(exchange, worker)
        if worker is not None:
            one.count_cached(worker, 9, 4)
    summed_recent = RecentWindow()
    summed = Metrics(whole, summed_recent)
    workers = dict(enumerate(whole.workers, start=1))
    for exchange, worker in exchanges(follows):
        dataplane.record(exchange, worker)
        if worker is not None:
            dataplane.count_cached(worker, 9, 4)
        body = msgspec.msgpack.decode(msgspec.msgpack.encode(dataplane.take()), type=MetricsEvent)
        merge_metrics(body, summed, summed_recent, workers.get)
    left = dataplane.take()
    assert not left.cells
    assert not left.slots
    wanted = overhead_aside(shown(one, recent))
    assert overhead_aside(shown(summed, summed_recent)) == wanted
    assert wanted[3] == 2


def test_a_long_stream_is_in_every_delta_and_no_gap_is_counted_twice():
    whole, follows = fleets()
    meters, recent, dataplane = (
        Metrics(whole, RecentWindow()),
        RecentWindow(),
        MetricsDelta(follows),
    )
    workers = dict(enumerate(whole.workers, start=1))
    exchange = ended()
    exchange.worker = follows.workers[0]
    path = exchange.route.path
    gaps = dataplane.gap_histogram(exchange)
    merge_metrics(dataplane.take(), meters, recent, workers.get)
    for secs in (0.02, 0.3, 4.0):
        gaps.observe(secs)
        merge_metrics(dataplane.take(), meters, recent, workers.get)
        dataplane.record(ended(exchange.worker), exchange.worker)  # another one ends meanwhile
        merge_metrics(dataplane.take(), meters, recent, workers.get)
    between = meters.series[path, whole.workers[0]].between
    assert (sum(between.counts), round(between.sum, 6)) == (3, 4.32)
    assert not dataplane.take().cells


def test_gaps_of_a_removed_worker_are_dropped():
    whole, follows = fleets()
    dataplane = MetricsDelta(follows)
    exchange = ended()
    exchange.worker = follows.workers[0]
    gaps = dataplane.gap_histogram(exchange)
    follows.follow([worker_state(whole.workers[1], 2, 2)], NOW)
    gaps.observe(0.1)
    assert not dataplane.take().cells


def test_counters_of_workers_are_merged_and_those_of_a_removed_one_dropped():
    whole, follows = fleets()
    meters, recent = Metrics(whole, RecentWindow()), RecentWindow()
    dataplane = MetricsDelta(follows)
    for worker in follows.workers:
        worker.add_counts("generation", routed=3, failed=1)
    reported = dataplane.take()
    merge_metrics(reported, meters, recent, {1: whole.workers[0]}.get)
    assert (whole.workers[0].routed["generation"], whole.workers[0].failed["generation"]) == (3, 1)
    assert not whole.workers[1].routed
    assert not dataplane.take().worker_ends


def test_exemplars_of_processes_reach_the_main_process():
    whole_fleet, follows = fleets()
    delta, meters, recent = (
        MetricsDelta(follows),
        Metrics(whole_fleet, RecentWindow()),
        RecentWindow(),
    )
    worker = follows.workers[0]
    delta.note_trace(ended(worker, trace=RequestTrace(b"0" * 31 + b"1")), worker)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(delta.take()), type=MetricsEvent)
    merge_metrics(sent, meters, recent, dict(enumerate(whole_fleet.workers, start=1)).get)
    rows = list(meters.exemplars.rows())
    assert {key for key, *_ in rows} == {("/v1/chat/completions", whole_fleet.workers[0])}
    assert sorted(round(noted.secs, 3) for *_, noted in rows) == [0.2, 1.1]
    assert list(delta.exemplars.rows()) == []
