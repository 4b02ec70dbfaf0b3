from collections import Counter
from types import SimpleNamespace

from msgspec import structs

from omni_proxy.config.parse import parse
from omni_proxy.multiprocess.aggregate import SILENCE, AggregateView, summed
from omni_proxy.multiprocess.process_manager import processes_of, share
from omni_proxy.watchdog import Watchdog


def test_facts_of_several_doors_are_added_and_shares_are_averaged():
    one = {"tree_size": 5, "picks": {"a": 1}, "matched_ratio": 0.5, "sticky": {"kept": 1}}
    other = {"tree_size": 7, "picks": {"a": 2, "b": 3}, "matched_ratio": 0.7, "sticky": {"kept": 2}}
    assert summed([one, other, {"matched_ratio": None}]) == {
        "tree_size": 12,
        "picks": {"a": 3, "b": 3},
        "sticky": {"kept": 3},
        "matched_ratio": 0.6,
    }
    assert summed([]) == {}


def test_all_doors_see_the_same_sessions():
    facts = {"sticky": {"sessions": 40, "kept": 2, "begun": 1}}
    assert summed([facts, facts])["sticky"] == {"sessions": 40, "kept": 4, "begun": 2}


def test_no_door_is_left_without_a_place_in_its_queue():
    config = parse('[server]\nqueue_size = 5\nmax_held_bytes = 1000\n[[workers]]\nurl = "http://a"')
    kept = share(config, 4)
    assert (kept.server.queue_size, kept.server.max_held_bytes) == (2, 250)
    assert kept.workers == ()
    assert share(parse(""), 4).server.queue_size == 0


def test_nought_processes_is_one_for_each_core():
    assert processes_of(parse("[server]\nprocesses = 0")) >= 1
    assert processes_of(parse("[server]\nprocesses = 3")) == 3
    assert processes_of(parse("")) == 1


def test_stalls_are_those_of_all_processes_also_of_doors_that_have_ended():
    counts = {**SILENCE.counts, "stalls": 2}
    link = SimpleNamespace(stand=structs.replace(SILENCE, counts=counts))
    unheard = SimpleNamespace(stand=None)
    doors = SimpleNamespace(door=None, gone=Counter(stalls=3), links=[link, unheard])
    watchdog = Watchdog()
    watchdog.stalls = 1
    told = AggregateView(doors, watchdog).watchdog()
    assert told == {**watchdog.status(), "stalls": 6}
