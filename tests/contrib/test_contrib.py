"""The files in contrib/ agree with the program."""

import configparser
import json
import re
from pathlib import Path

import pytest
import yaml

from omni_proxy.config.parse import parse
from tests.config.test_example import TEXT as EXAMPLE

CONTRIB = Path(__file__).parents[2] / "contrib"
MANIFESTS = list(yaml.safe_load_all((CONTRIB / "kubernetes/omni-proxy.yaml").read_text()))
ENGINES = yaml.safe_load((CONTRIB / "compose/engines.yaml").read_text())


def of_kind(kind):
    (found,) = [each for each in MANIFESTS if each["kind"] == kind]
    return found


CONFIGS = {
    "compose": (CONTRIB / "compose/engines.toml").read_text(),
    "kubernetes": of_kind("ConfigMap")["data"]["proxy.toml"],
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_for_a_container_is_taken_and_listens_to_all(text):
    server = parse(text).server
    assert server.host == "0.0.0.0"
    assert server.access_log == "-"


def drain_secs(text):
    server = parse(text).server
    return server.ready_off_secs + server.drain_timeout_secs


def test_who_starts_the_proxy_gives_it_time_to_drain():
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > drain_secs(CONFIGS["kubernetes"])
    grace = ENGINES["services"]["proxy"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > drain_secs(CONFIGS["compose"])
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(CONTRIB / "systemd/omni-proxy.service")
    assert int(unit["Service"]["TimeoutStopSec"]) > drain_secs("")
    assert unit["Service"]["KillMode"] == "mixed"


def test_the_probes_of_a_pod_are_those_of_the_program():
    (container,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    ports = [parse(CONFIGS["kubernetes"]).server.port, 29000]  # the second one is scraped
    assert [each["containerPort"] for each in container["ports"]] == ports
    assert [each["port"] for each in of_kind("Service")["spec"]["ports"]] == ports


def test_selectors_find_what_the_manifests_make():
    pod = of_kind("Deployment")["spec"]["template"]
    for selector in (
        of_kind("Deployment")["spec"]["selector"]["matchLabels"],
        of_kind("Service")["spec"]["selector"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        yaml.safe_load((CONTRIB / "kubernetes/servicemonitor.yaml").read_text())["spec"][
            "selector"
        ]["matchLabels"],
    ):
        assert selector.items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["serviceAccountName"] == of_kind("ServiceAccount")["metadata"]["name"]


def test_workers_of_the_composition_are_its_services():
    hosts = [
        re.fullmatch(r"http://([a-z-]+):30000", worker.url)[1]
        for worker in parse(CONFIGS["compose"]).workers
    ]
    assert set(hosts) == ENGINES["services"].keys() - {"proxy"}


def test_every_panel_of_the_dashboard_is_of_the_chosen_instances():
    dashboard = json.loads((CONTRIB / "grafana/omni-proxy.json").read_text())
    names = [each["name"] for each in dashboard["templating"]["list"]]
    assert names == ["datasource", "instance"]
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    assert expressions
    for expression in expressions:
        series = re.findall(r"\b(?:omni_proxy|gen_ai)_\w+", expression)
        assert expression.count('instance=~"$instance"') == len(series), expression


def test_the_example_has_the_keys_that_the_manifests_explain():
    for key in ("ready_off_secs", "drain_timeout_secs", "max_held_bytes"):
        assert f"{key} = " in EXAMPLE
