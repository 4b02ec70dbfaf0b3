"""The compose files match the schema of the specification, and mount files that exist."""

import importlib.resources
import json

import jsonschema_rs
import pytest
import yaml

from omni_proxy.config.parse import parse
from tests.tree import ROOT

FOLDER = ROOT / "contrib/compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())


MOUNTED = {"compose.yaml": 5, "engines.yaml": 1}  # at least this many files


@pytest.mark.parametrize("name", MOUNTED)
def test_a_compose_file_matches_the_specification(name):
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    jsonschema_rs.validate(schema, yaml.safe_load((FOLDER / name).read_text()))


@pytest.mark.parametrize("name", MOUNTED)
def test_every_mounted_file_exists(name):
    compose = yaml.safe_load((FOLDER / name).read_text())
    mounts = [
        mount for service in compose["services"].values() for mount in service.get("volumes", [])
    ]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(files) >= MOUNTED[name]
    for file in files:
        assert (FOLDER / file).resolve().is_file(), file


def test_configurations_use_the_names_of_services():
    config = parse((FOLDER / "proxy.toml").read_text())
    services = set(COMPOSE["services"])
    assert {worker.url.split("/")[2].split(":")[0] for worker in config.workers} <= services
    assert config.cluster.url == "redis://valkey:6379/0"
    assert "valkey" in services
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"][0]
    (target,) = scrape["static_configs"][0]["targets"]
    assert target == f"proxy:{config.admin.metrics_listen.rpartition(':')[2]}"
    grace = int(COMPOSE["services"]["proxy"]["stop_grace_period"].removesuffix("s"))
    assert grace > config.server.drain_timeout_secs
    source = yaml.safe_load((FOLDER / "grafana-datasource.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
