import sys
from pathlib import Path

import pytest

from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.schema import RoutingConfig
from omni_proxy.routing.policies import Policy, build_policy
from omni_proxy.routing.policies.plugins import LOG_INTERVAL_SECS, GuardedPolicy, check_policy
from tests.routing.policies.chats import NEED, first, workers

HERE = __name__
ROOT = Path(__file__).parents[3]


class Last(Policy):
    def pick(self, candidates, need):
        return candidates[-1]

    def preview_pick(self, candidates, need):
        return candidates[-1], "the last"


class Faulty(Policy):
    """Every method raises."""

    def pick(self, candidates, need):
        raise ZeroDivisionError("pick")

    preview_pick = explain_pick = record_pick = pick

    def forget_worker(self, worker):
        raise ZeroDivisionError("forget_worker")

    maintain = reconfigure = forget_worker

    def stats(self):
        raise ZeroDivisionError("stats")


class PicksOutsider(Last):
    def pick(self, candidates, need):
        return workers(0)[0]

    def preview_pick(self, candidates, need):
        return self.pick(candidates, need), "an outsider"


class WithoutPreview(Policy):
    def pick(self, candidates, need):
        return candidates[0]


class Uncreatable(Last):
    def __init__(self):
        raise RuntimeError("no licence")


class NoPolicy:
    pass


def plugin(name, before=None):
    return build_policy(RoutingConfig(policy=f"{HERE}:{name}"), first, 0.0, before)


def check(name):
    check_policy(parse(f'routing.policy = "{name}"'), "proxy.toml")


def test_a_class_path_names_a_policy():
    check(f"{HERE}:Last")
    policy, fleet = plugin("Last"), workers(0, 0, 0)
    assert policy.name == f"{HERE}:Last"
    assert policy.pick(fleet, NEED) is fleet[2]
    assert policy.preview_pick(fleet, NEED) == (fleet[2], "the last")
    assert policy.stats() == {"policy_failures": 0, "fallback": "least_request"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_:X", "the module no_such_module_ of the policy .* can't be imported"),
        (f"{HERE}:Missing", "is not a class derived from Policy; derive it from"),
        (f"{HERE}:NoPolicy", "is not a class derived from Policy"),
        (f"{HERE}:WithoutPreview", "lacks preview_pick; define them"),
        (f"{HERE}:Uncreatable", "can't be created: RuntimeError: no licence at .*:[0-9]+;"),
    ],
)
def test_a_configuration_whose_policy_cannot_be_loaded_is_refused(name, message):
    with pytest.raises(ConfigError, match=f"^proxy.toml: routing.policy: .*{message}"):
        check(name)


def test_a_module_that_exits_on_import_is_refused(tmp_path, monkeypatch):
    (tmp_path / "exits_on_import.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="SystemExit: 3"):
        check("exits_on_import:X")


def test_the_fallback_picks_if_a_policy_raises(caplog):
    policy, fleet = plugin("Faulty"), workers(3, 1, 2)
    assert policy.pick(fleet, NEED) is fleet[1]
    worker, reason = policy.preview_pick(fleet, NEED)
    assert worker is fleet[1]
    assert reason.startswith(f"the policy {HERE}:Faulty failed, so least_request: the least loaded")
    assert policy.explain_pick(fleet, NEED) == {}
    policy.record_pick(fleet[0], NEED)
    policy.forget_worker(fleet[0])
    policy.maintain(1.0)
    assert policy.stats()["policy_failures"] == 7
    (line,) = caplog.messages
    assert line.startswith(
        f"policy_failed policy={HERE}:Faulty method=pick error=ZeroDivisionError"
    )
    assert line.endswith("failures=1 fallback=least_request")


def test_failures_are_logged_once_a_minute_with_their_count(caplog):
    policy, fleet = plugin("PicksOutsider"), workers(0, 0)
    for _ in range(5):
        assert policy.pick(fleet, NEED) in fleet
    policy.maintain(LOG_INTERVAL_SECS)
    policy.pick(fleet, NEED)
    assert [line.rpartition("failures=")[2] for line in caplog.messages] == [
        "1 fallback=least_request", "6 fallback=least_request",
    ]  # fmt: skip
    assert "is not a candidate" in caplog.messages[0]


def test_a_policy_that_cannot_be_created_is_replaced_by_the_fallback(caplog):
    policy, fleet = plugin("Uncreatable"), workers(1, 0)
    assert policy.pick(fleet, NEED) is fleet[1]
    assert caplog.messages[0].startswith(f"policy_unavailable policy={HERE}:Uncreatable error=")
    assert plugin("Uncreatable", policy) is not policy


def test_a_reload_keeps_the_policy_and_another_name_replaces_it():
    policy = plugin("Last")
    assert plugin("Last", policy) is policy
    assert plugin("PicksOutsider", policy) is not policy
    built_in = build_policy(RoutingConfig(policy="random"), first, 0.0, policy)
    assert built_in.name == "random"
    assert plugin("Last", built_in).name == f"{HERE}:Last"


def test_sticky_sessions_work_with_a_plugin_policy():
    routing = RoutingConfig(policy=f"{HERE}:Last", sticky_sessions=True)
    policy = build_policy(routing, first, 0.0)
    assert isinstance(policy.inner, GuardedPolicy)
    fleet = workers(0, 0)
    assert policy.pick(fleet, NEED) is fleet[1]


def test_nothing_is_imported_for_a_built_in_policy(monkeypatch):
    monkeypatch.setitem(sys.modules, "importlib.metadata", None)
    check("least_request")
    with pytest.raises(ImportError):
        check("installed_policy")


def test_the_policies_of_pools_are_also_checked():
    table = f'[routing.disaggregation]\nprefill_policy = "{HERE}:Last"\ndecode_policy = "a:B"'
    with pytest.raises(ConfigError) as refused:
        check_policy(parse(table), "proxy.toml")
    assert "routing.disaggregation.decode_policy" in str(refused.value)
    assert "prefill_policy" not in str(refused.value)
