import pytest

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.fleet.worker import apply_state, shown_adapters, worker_state
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import eligible_workers, ineligibility_reasons, no_worker_error
from tests.fleet.entries import NOW, entry, fleet_of


def names(workers):
    return [worker.display_id.partition(":")[0] for worker in workers]


@pytest.fixture
def fleet():
    return fleet_of(
        entry("a", model="base", loras=("x", "y")),
        entry("b", model="base", loras=("y",)),
        entry("c", model="other"),
        entry("d"),
    )


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("x", ["a"]),
        ("y", ["a", "b"]),
        ("base:y", ["a", "b"]),
        (":x", ["a"]),
        ("base", ["a", "b"]),
        ("other", ["c"]),
        ("unknown", []),
        ("other:x", []),
        (None, ["a", "b", "c", "d"]),
    ],
)
def test_a_request_for_an_adapter_goes_to_the_workers_that_have_it(fleet, model, expected):
    assert names(fleet.candidates(model, 0)) == expected


def test_an_unknown_adapter_is_an_unknown_model(fleet):
    error = no_worker_error(fleet, Requirements(0, "unknown"))
    assert (error.status, error.code) == (503, "model_not_found")
    reasons = ineligibility_reasons(fleet, fleet.workers[1], Requirements(0, "x"))
    assert reasons == ["serves the model 'base', not 'x'"]


def test_an_adapter_of_a_disabled_worker_has_no_candidates(fleet):
    entries = [
        entry("a", model="base", loras=("x",), disabled=True),
        entry("b", model="base"),
    ]
    fleet.apply(entries, NOW)
    assert fleet.candidates("x", 0) == []
    assert no_worker_error(fleet, Requirements(0, "x")).code == "all_disabled"


def test_workers_without_a_model_serve_their_adapters_and_any_other_name():
    fleet = fleet_of(entry("a", loras=("x",)), entry("b"))
    assert names(fleet.candidates("x", 0)) == ["a"]
    assert names(fleet.candidates("anything", 0)) == ["a", "b"]
    assert fleet.has_named_models


def test_a_fleet_without_adapters():
    fleet = fleet_of(entry("a", model="m"))
    assert not fleet.has_adapters
    assert fleet.models == {"m"}


def test_reported_adapters_count_only_with_auto(fleet):
    worker = fleet.workers[0]
    fleet.report_adapters(worker, ("new", ":new"))
    assert names(fleet.candidates("new", 0)) == []
    fleet.apply([entry("a", model="base", loras="auto")], NOW)
    assert names(fleet.candidates("new", 0)) == ["a"]
    assert shown_adapters(worker) == ["new"]
    revision = fleet.revision
    fleet.report_adapters(worker, ("new", ":new"))
    assert fleet.revision == revision


def test_other_processes_get_the_reported_adapters():
    fleet = fleet_of(entry("a", model="base", loras="auto"))
    (worker,) = fleet.workers
    fleet.report_adapters(worker, ("new",))
    state = worker_state(worker, 1, 0)
    (other,) = fleet_of(entry("a", model="base", loras="auto")).workers
    assert apply_state(other, state)
    assert other.serves("new")
    assert not apply_state(other, state)


def test_candidates_for_an_adapter_have_the_needed_capabilities():
    fleet = fleet_of(
        entry("a", model="m", loras=("x",), capabilities=frozenset({"chat"})),
        entry("b", model="m", loras=("x",), capabilities=frozenset(CAPABILITIES)),
    )
    mask = fleet.workers[1].mask
    assert names(eligible_workers(fleet, Requirements(mask, "x"))) == ["b"]
