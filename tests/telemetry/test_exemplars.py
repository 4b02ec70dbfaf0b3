from omni_proxy.dataplane.tracing.request_trace import RequestTrace
from omni_proxy.telemetry.exemplars import FIRST, TOTAL, Exemplars, Noted, marked
from omni_proxy.telemetry.histogram import DURATION
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.fleet.entries import NOW, entry, fleet_of
from tests.telemetry.ends import ended, refused

KEY = ("/v1/chat/completions", None)


def noted(trace_id, secs, at):
    return Noted(trace_id, secs, at)


def shown(marks):
    return {le: (mark.labels["trace_id"], mark.value, mark.timestamp) for le, mark in marks.items()}


def test_each_bucket_has_the_newest_request_that_fell_there():
    exemplars = Exemplars()
    for trace, secs, at in [
        ("a", 0.011, 5.0),
        ("b", 0.012, 6.0),
        ("old", 0.012, 1.0),
        ("c", 999, 2),
    ]:
        exemplars.put(KEY, TOTAL, noted(trace, secs, at))
    marks = exemplars.marks([KEY], TOTAL)
    assert shown(marks) == {"0.02": ("b", 0.012, 6.0), "+Inf": ("c", 999, 2)}
    assert exemplars.marks([KEY], FIRST) == {}


def test_a_value_at_a_bound_is_in_the_bucket_below_it():
    exemplars = Exemplars()
    exemplars.put(KEY, TOTAL, noted("a", DURATION[3], 1.0))
    assert list(exemplars.marks([KEY], TOTAL)) == [f"{DURATION[3]:.10g}"]


def test_of_several_series_the_newest_counts():
    exemplars, other = Exemplars(), ("/generate", None)
    exemplars.put(KEY, TOTAL, noted("a", 0.011, 5.0))
    exemplars.put(other, TOTAL, noted("b", 0.012, 4.0))
    assert shown(exemplars.marks([KEY, other], TOTAL)) == {"0.02": ("a", 0.011, 5.0)}


def test_buckets_without_an_exemplar_stay_as_they_are():
    exemplars = Exemplars()
    exemplars.put(KEY, TOTAL, noted("a", 0.011, 5.0))
    marks = exemplars.marks([KEY], TOTAL)
    assert marked([("0.01", 1), ("0.02", 3)], marks) == [("0.01", 1), ("0.02", 3, marks["0.02"])]
    assert marked([("0.01", 1)], {}) == [("0.01", 1)]


def test_a_request_is_noted_with_both_its_times_and_leaves_with_its_worker():
    fleet = fleet_of(entry("a"))
    meters, (worker,) = Metrics(fleet, RecentWindow()), fleet.workers
    trace = RequestTrace(b"4bf92f3577b34da6a3ce929d0e0e4736")
    meters.note_trace(ended(worker, trace=trace), worker)
    meters.note_trace(refused(trace=trace), None)
    meters.note_trace(ended(worker, trace=trace, route=None), worker)
    found = {(key[1], kind): each for key, kind, each in meters.exemplars.rows()}
    assert {key: round(each.secs, 3) for key, each in found.items()} == {
        (worker, TOTAL): 1.1, (worker, FIRST): 0.2, (None, TOTAL): 1.1,
    }  # fmt: skip
    assert {each.trace_id for each in found.values()} == {trace.trace_id.decode()}
    fleet.apply([], NOW)
    meters.drop_removed_workers()
    assert {key[1] for key, *_ in meters.exemplars.rows()} == {None}
