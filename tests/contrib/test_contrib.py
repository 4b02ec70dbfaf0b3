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
    (manifest,) = [candidate for candidate in MANIFESTS if candidate["kind"] == kind]
    return manifest


CONFIGS = {
    "compose": (CONTRIB / "compose/engines.toml").read_text(),
    "kubernetes": of_kind("ConfigMap")["data"]["proxy.toml"],
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_for_a_container_is_valid_and_listens_on_all_addresses(text):
    server = parse(text).server
    assert server.host == "0.0.0.0"
    assert server.access_log == "-"


def drain_secs(text):
    server = parse(text).server
    return server.ready_off_secs + server.drain_timeout_secs


def test_stop_timeouts_are_longer_than_a_drain():
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
    ports = [parse(CONFIGS["kubernetes"]).server.port, 29000]  # Prometheus scrapes the second
    assert [each["containerPort"] for each in container["ports"]] == ports
    assert [each["port"] for each in of_kind("Service")["spec"]["ports"]] == ports


def test_selectors_match_the_labels_of_the_pod():
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


def test_workers_of_the_compose_file_are_its_services():
    hosts = [
        re.fullmatch(r"http://([a-z-]+):30000", worker.url)[1]
        for worker in parse(CONFIGS["compose"]).workers
    ]
    assert set(hosts) == ENGINES["services"].keys() - {"proxy"}


def test_every_panel_of_the_dashboard_shows_the_selected_instances():
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
