"""Each side of the features bench is a configuration that the proxy accepts."""

from omni_proxy.config.parse import parse
from tools.bench.data_plane.features import LIMITS, PLAIN, WORKER_KEY, fleet_sides, sides
from tools.bench.harness.load_run import KEY
from tools.bench.harness.proxies import OMNI_FILE, Place, proxy


def configs(folder, make_sides=None):
    omni = proxy("omni-proxy --config {config}", "omni-proxy")
    configurations = {}
    for side in make_sides(omni) if make_sides else sides(omni, "http://127.0.0.1:9"):
        side.command(Place(30000, [8000, 8001], folder))
        configurations[side.name] = parse((folder / OMNI_FILE).read_text())
    return configurations


def test_each_side_differs_from_the_plain_side_in_its_feature(tmp_path):
    configurations = configs(tmp_path)
    plain = configurations.pop(PLAIN)
    assert (plain.server.metrics, plain.keys, plain.observe.otlp_endpoint) == (True, (), "")
    assert plain not in configurations.values()
    assert not configurations["no metrics"].server.metrics
    assert configurations["[server] api_key"].server.api_key == KEY
    limits = [
        sum(bool(getattr(config.keys[0], name)) for name in LIMITS)
        for config in configurations.values()
        if config.keys
    ]
    assert limits == [0, 1, 2, 3]
    shares = [
        each.observe.trace_sampling
        for each in configurations.values()
        if each.observe.otlp_endpoint
    ]
    assert shares == [0.0, 0.01, 1.0]


def test_sides_of_fleets_differ_in_aliases_ranks_and_keys_of_workers(tmp_path):
    configurations = configs(tmp_path, fleet_sides)
    settings = {
        name: (
            [entry.name for entry in config.routing.models],
            [worker.ranks for worker in config.workers],
            [worker.api_key_env for worker in config.workers],
        )
        for name, config in configurations.items()
    }
    key = WORKER_KEY
    assert list(settings.values()) == [
        ([], [0, 0], ["", ""]),
        (["other"], [0, 0], ["", ""]),
        ([], [2, 0], ["", ""]),
        ([], [2, 2], ["", ""]),
        (["other"], [2, 2], ["", ""]),
        (["bench"], [0, 0], ["", ""]),
        ([], [0, 0], [key, key]),
    ]
