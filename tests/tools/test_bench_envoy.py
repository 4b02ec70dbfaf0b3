import json

import pytest

from tests.promises.support.envoy_program import needs_envoy
from tools.bench.envoy_picker import MEASURED, _row, sides
from tools.bench.harness.load_run import LOADS, Leg
from tools.bench.harness.proxies import OMNI_FILE, Place

pytestmark = needs_envoy


@pytest.fixture
def place(tmp_path):
    return Place(1234, [5001, 5002, 5003], tmp_path)


@pytest.fixture(scope="module")
def all_sides():
    """Made once: the search for an interpreter with the packages of omni-proxy imports them all."""
    return sides()


def config_of(side, place):
    argv = side.command(place)
    return argv, json.loads((place.folder / "envoy.json").read_text())["static_resources"]


def filters(config):
    manager = config["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return [each["name"].rpartition(".")[2] for each in manager["http_filters"]]


def test_envoy_alone_has_every_worker_and_no_external_processor(all_sides, place):
    argv, config = config_of(all_sides[0], place)
    assert filters(config) == ["router"]
    assert argv[-2:] == ["-l", "warning"]
    assert all(str(port) in json.dumps(config) for port in (1234, *place.workers))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_envoy_asks_the_picker_that_is_started_with_it(all_sides, place, number):
    argv, config = config_of(all_sides[number], place)
    assert filters(config) == ["ext_proc", "router"]
    assert argv[:2] == ["sh", "-c"]
    assert " picker --config " in argv[2]
    (picker,) = [each for each in config["clusters"] if each["name"] == "picker"]
    text = json.dumps(picker)
    listen = (place.folder / OMNI_FILE).read_text().split('grpc_listen = "127.0.0.1:')[1]
    assert f'"port_value": {listen.partition(chr(34))[0]}' in text


def test_a_row_has_medians_and_envoys_latency_in_the_same_rounds():
    def leg(cpu, p50):
        return Leg("l", "s", cpu, 1.0, 1, 1.0, 1.0, p50, 2 * p50, 0.0, 0, "")

    legs, bare, first = [leg(30.0, 8.0)], [leg(None, 3.0)], [leg(10.0, 5.0)]
    assert _row("x", legs, bare, first) == "| x | 30 | 3.00 | 8 | 16 | 5 |"


def test_the_loads_that_are_measured_exist():
    assert set(MEASURED) <= {load.name for load in LOADS}
