from collections import Counter
from types import SimpleNamespace

from msgspec import structs

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.services import Totals
from omni_proxy.dataplane.status import counters, totals_record
from omni_proxy.multiprocess.aggregate import NO_STATS, AggregateView, sum_stats
from omni_proxy.multiprocess.process_manager import per_process_config, process_count
from omni_proxy.shared.watchdog import Watchdog


def test_statistics_of_processes_are_added_and_ratios_averaged():
    first = {"tree_size": 5, "picks": {"a": 1}, "matched_ratio": 0.5, "sticky": {"kept": 1}}
    second = {
        "tree_size": 7,
        "picks": {"a": 2, "b": 3},
        "matched_ratio": 0.7,
        "sticky": {"kept": 2},
    }
    assert sum_stats([first, second, {"matched_ratio": None}]) == {
        "tree_size": 12,
        "picks": {"a": 3, "b": 3},
        "sticky": {"kept": 3},
        "matched_ratio": 0.6,
    }
    assert sum_stats([]) == {}


def test_sessions_are_shared_by_all_processes():
    facts = {"sticky": {"sessions": 40, "kept": 2, "begun": 1}}
    assert sum_stats([facts, facts])["sticky"] == {"sessions": 40, "kept": 4, "begun": 2}


def test_limits_divided_among_processes_are_rounded_up():
    config = parse('[server]\nqueue_size = 5\nmax_held_bytes = 1000\n[[workers]]\nurl = "http://a"')
    divided = per_process_config(config, 4)
    assert (divided.server.queue_size, divided.server.max_held_bytes) == (2, 250)
    assert divided.workers == ()
    assert per_process_config(parse(""), 4).server.queue_size == 0


def test_zero_processes_means_one_for_each_core():
    assert process_count(parse("[server]\nprocesses = 0")) >= 1
    assert process_count(parse("[server]\nprocesses = 3")) == 3
    assert process_count(parse("")) == 1


def test_stalls_of_running_and_exited_processes_are_summed():
    counts = {**NO_STATS.counts, "stalls": 2}
    handle = SimpleNamespace(stats=structs.replace(NO_STATS, counts=counts))
    without_stats = SimpleNamespace(stats=None)
    processes = SimpleNamespace(
        dataplane=None, exited_counts=Counter(stalls=3), handles=[handle, without_stats]
    )
    watchdog = Watchdog()
    watchdog.stalls = 1
    status = AggregateView(processes, watchdog).watchdog()
    assert status == {**watchdog.status(), "stalls": 6}


def test_counters_of_running_and_exited_processes_are_summed():
    totals = Totals()
    totals.failed_handshakes, totals.failed_proxy_headers = 1, 2
    services = SimpleNamespace(totals=totals, loop=SimpleNamespace(connections=0, failures=0))
    stats = structs.replace(NO_STATS, counts={**NO_STATS.counts, "failed_proxy_headers": 3})
    processes = SimpleNamespace(
        dataplane=SimpleNamespace(
            services=services, loop=services.loop, counts=lambda: totals_record(services)
        ),
        exited_counts=Counter(failed_proxy_headers=4),
        exited_outcomes=Counter(),
        handles=[SimpleNamespace(stats=stats)],
    )
    counts = AggregateView(processes, Watchdog()).counts()
    assert counts["failed_tls_handshakes"] == 1
    assert counts["failed_proxy_headers"] == counts["failed_proxy_introductions"] == 9


def test_each_counter_of_a_process_is_in_its_report():
    services = SimpleNamespace(totals=Totals(), loop=SimpleNamespace(connections=0, failures=0))
    numbers = {name for name, value in totals_record(services).items() if isinstance(value, int)}
    old_name = "failed_proxy_introductions"
    assert numbers - {"connections", old_name} == set(counters(services))


def test_a_statistic_that_cannot_be_summed_is_that_of_the_last_process():
    rows = [{"n": 1, "text": "a", "odd": 1}, {"n": 2, "text": "b", "odd": {"k": 3}}]
    assert sum_stats(rows) == {"n": 3, "text": "b", "odd": {"k": 3}}


def test_the_policies_of_the_pools_are_summed_over_all_processes():
    def handle(**pools):
        return SimpleNamespace(stats=structs.replace(NO_STATS, pool_policies=pools))

    prefill = {"name": "cache_aware", "picks": {"matched": 3}, "matched_ratio": 0.5}
    own = SimpleNamespace(stats=dict)
    processes = SimpleNamespace(
        dataplane=SimpleNamespace(balancer=SimpleNamespace(pool_policies=own)),
        exited_counts=Counter(),
        handles=[handle(prefill=prefill), handle(prefill=prefill, decode={"name": "random"})],
    )
    assert AggregateView(processes, Watchdog()).pool_stats() == {
        "prefill": {"name": "cache_aware", "picks": {"matched": 6}, "matched_ratio": 0.5},
        "decode": {"name": "random"},
    }
