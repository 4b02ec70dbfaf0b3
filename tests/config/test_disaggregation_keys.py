"""Keys of prefill and decode workers, of ranks, adapters and aliases."""

import pytest

from omni_proxy.config.diff import redacted
from omni_proxy.config.overlay import (
    SavedState,
    desired_workers,
    read_state,
    render_state,
    with_added,
    with_deleted,
    with_override,
)
from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.schema import Config, DisaggregationConfig, WorkerEntry
from omni_proxy.config.state import StateWorker
from tests.fleet.entries import entry


def worker(lines="", url="http://a:1"):
    return f'[[workers]]\nurl = "{url}"\n{lines}\n'


def spec_of(lines=""):
    return desired_workers(parse(worker(lines)), (), SavedState())[0]


def problems_of(text):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


def test_a_worker_without_the_keys_has_no_role():
    spec = spec_of()
    assert (spec.role, spec.kv_connector, spec.ranks, spec.loras) == ("", "sglang", 1, ())


def test_the_keys_of_a_prefill_worker_are_in_its_spec():
    spec = spec_of('role = "prefill"\nkv_connector = "mooncake"\nbootstrap_port = 9001\nranks = 4')
    assert (spec.role, spec.kv_connector, spec.bootstrap_port) == ("prefill", "mooncake", 9001)
    assert spec.ranks == 4


def test_a_prefill_worker_has_the_default_port_and_0_means_unknown():
    assert spec_of('role = "prefill"').bootstrap_port == 8998
    assert spec_of('role = "prefill"\nbootstrap_port = 0').bootstrap_port is None


def test_ranks_and_adapters_may_be_left_to_the_engine():
    spec = spec_of('ranks = "auto"\nloras = "auto"')
    assert (spec.ranks, spec.loras) == ("auto", "auto")
    assert spec_of('loras = ["x", "y"]').loras == ("x", "y")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('role = "prefil"', "did you mean `prefill`?"),
        ('role = "both"', 'is not one of "", decode, prefill, regular'),
        ('kv_connector = "moriio"', "is not one of"),
        ('ranks = "all"', 'expected a whole number or "auto", got "all"'),
        ("ranks = -1", "at least 0"),
        ("ranks = true", "expected a whole number"),
        ('loras = "x"', 'expected a list or "auto", got "x"'),
        ('loras = [""]', "must not be empty"),
        ("bootstrap_port = 65536", "at most 65535"),
        ('role = "regular"\nkv_connector = "nixl"', "for prefill and decode workers only"),
        ('role = "decode"\nbootstrap_port = 9001', "for prefill workers only"),
        ('role = "prefill"\nkv_connector = "nixl"\nbootstrap_port = 9001', "no effect with nixl"),
    ],
)
def test_an_invalid_value_is_refused_with_its_path_and_reason(line, reason):
    text = problems_of(worker(line))
    assert reason in text
    assert "workers.0." in text or "workers[0]" in text


def test_disaggregation_has_defaults_and_refuses_unknown_policies():
    assert parse("").routing.disaggregation == DisaggregationConfig()
    table = '[routing.disaggregation]\nprefill_policy = "cache_aware"\nfallback = "refuse"\n'
    assert parse(table).routing.disaggregation.prefill_policy == "cache_aware"
    assert "least_request" in problems_of(
        '[routing.disaggregation]\ndecode_policy = "least_reques"'
    )
    assert "refuse" in problems_of('[routing.disaggregation]\nfallback = "no"')


def test_aliases_and_their_targets_are_unique():
    alias = (
        '[[routing.models]]\nname = "n"\ntargets = [{ model = "a" }, { model = "b", weight = 3 }]\n'
    )
    (parsed,) = parse(alias).routing.models
    assert [(target.model, target.weight) for target in parsed.targets] == [("a", 1), ("b", 3)]
    assert parsed.rewrite
    assert "duplicate alias n" in problems_of(alias + alias)
    twice = alias.replace('"b"', '"a"')
    assert "duplicate target a" in problems_of(twice)
    assert "must not be empty" in problems_of('[[routing.models]]\nname = "n"\ntargets = []\n')


def test_the_shown_configuration_names_the_role_of_each_worker():
    config = parse(worker() + worker('role = "decode"', "http://b:1"))
    assert [entry["role"] for entry in redacted(config)["workers"]] == ["regular", "decode"]


def test_a_saved_worker_keeps_the_keys():
    spec = spec_of('role = "prefill"\nbootstrap_port = 9001\nranks = "auto"\nloras = ["x"]')
    state = read_state(render_state(with_added(SavedState(), spec)), "state")
    (read,) = desired_workers(Config(), (), state)
    assert (read.role, read.bootstrap_port, read.ranks) == ("prefill", 9001, "auto")
    assert read.loras == ("x",)


def test_an_override_of_the_role_has_precedence_over_the_file():
    config = parse(worker('role = "prefill"'))
    state = with_override(SavedState(), "http://a:1", role="decode")
    state = read_state(render_state(state), "state")
    (read,) = desired_workers(config, (), state)
    assert read.role == "decode"


def test_a_worker_saved_by_an_earlier_release_is_read():
    assert read_state('[[workers]]\nurl = "http://a:1"\n', "state").workers == (
        StateWorker(url="http://a:1"),
    )


def test_a_tombstone_of_an_earlier_release_still_hides_its_entry():
    config = Config(workers=(WorkerEntry(url="http://a:1", model="m"),))
    state = with_deleted(SavedState(), config, "http://a:1")
    assert state.tombstones == {"http://a:1": "51f7c42f5c0e438e"}
    assert not desired_workers(parse(worker('model = "m"')), (), state)
    assert desired_workers(parse(worker('model = "m"\nranks = 2')), (), state)


@pytest.mark.parametrize("default", ["4", '"auto"'])
def test_the_ranks_of_routing_are_the_default_of_workers(default):
    text = f'[routing]\nranks = {default}\n[[workers]]\nurl = "http://a"\n'
    text += '[[workers]]\nurl = "http://b"\nranks = 1\n'
    state = with_added(SavedState(), entry("d"))
    specs = desired_workers(parse(text), ("http://c",), read_state(render_state(state), "state"))
    expected = "auto" if "auto" in default else 4
    assert [spec.ranks for spec in specs] == [expected, 1, expected, expected]
