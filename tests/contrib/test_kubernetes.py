"""Manifests and chart match the schemas of the Kubernetes API, and are consistent."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from omni_proxy.config.parse import parse
from tests.tree import ROOT

FOLDER = ROOT / "contrib/kubernetes"
MANIFESTS = ("omni-proxy.yaml", "valkey.yaml")
SCHEMAS = "1.37"
NAME = "app.kubernetes.io/name"
# The used part of the schema of the Prometheus operator's ServiceMonitor (v1): no maintained
# package has it for the Python version of the tests.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
MONITOR = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": {
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "labels": TEXTS},
            "additionalProperties": False,
        },
        "spec": {
            "required": ["selector", "endpoints"],
            "properties": {
                "selector": {
                    "properties": {"matchLabels": TEXTS},
                    "required": ["matchLabels"],
                    "additionalProperties": False,
                },
                "endpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": {
                                "type": "string",
                                "pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$",
                            },
                        },
                        "required": ["port"],
                        "additionalProperties": False,
                    },
                },
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}


def things(text: str) -> list[dict]:
    return [thing for thing in yaml.safe_load_all(text) if thing is not None]


def manifests() -> list[dict]:
    return [thing for name in MANIFESTS for thing in things((FOLDER / name).read_text())]


def rendered(**values) -> list[dict]:
    """The objects that Helm renders from the chart."""
    helm = pytest.importorskip("helm_python.chart", reason="pip install helm-python-sdk")
    texts = helm.Chart.load(FOLDER / "chart").render(values, name="r", namespace="n")
    return [thing for text in texts.values() for thing in things(text)]


def named(objects: list[dict], kind: str, name: str = "") -> dict:
    return next(
        thing for thing in objects if thing["kind"] == kind and name in thing["metadata"]["name"]
    )


def check(objects: list[dict]) -> None:
    """Checks the objects against the schemas and against each other."""
    import kubernetes_validate  # imported here: it takes more than a second in each process

    for thing in objects:
        if thing["kind"] == "ServiceMonitor":  # a resource of the Prometheus operator
            jsonschema_rs.validate(MONITOR, thing)
        else:
            kubernetes_validate.validate(thing, SCHEMAS, strict=True)
    for deployment in (each for each in objects if each["kind"] == "Deployment"):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
        service = named(objects, "Service", deployment["metadata"]["name"])
        assert service["spec"]["selector"].items() <= labels.items()
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    check_consistency(objects)


def check_consistency(objects: list[dict]) -> None:
    """Checks the proxy's configuration against its deployment, permissions and network policy."""
    config = parse(named(objects, "ConfigMap")["data"]["proxy.toml"])
    deployment = next(
        thing
        for thing in objects
        if thing["kind"] == "Deployment" and "valkey" not in thing["metadata"]["name"]
    )
    pod = deployment["spec"]["template"]["spec"]
    server = config.server
    assert pod["terminationGracePeriodSeconds"] > server.ready_off_secs + server.drain_timeout_secs
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert ports == {
        "http": server.port,
        "metrics": int(config.admin.metrics_listen.rpartition(":")[2]),
    }
    mounts = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    assert any(server.state_file.startswith(mount) for mount in mounts)
    for role in (thing for thing in objects if thing["kind"] in ("Role", "ClusterRole")):
        assert role["rules"] == [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
        ]
        (entry,) = config.discover
        assert entry.namespace == ("*" if role["kind"] == "ClusterRole" else "")
        binding = named(objects, f"{role['kind']}Binding")
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"][0]["name"] == pod["serviceAccountName"]
    for policy in (thing for thing in objects if thing["kind"] == "NetworkPolicy"):
        if "valkey" not in policy["metadata"]["name"]:
            check_network_policy(
                policy, deployment["spec"]["template"]["metadata"]["labels"], ports
            )
    variables = {thing["name"] for thing in pod["containers"][0].get("env", [])}
    assert config.cluster.url_env in {"", *variables}
    valkeys = {
        thing["metadata"]["name"] for thing in objects if "valkey" in thing["metadata"]["name"]
    }
    assert bool(valkeys) is ("valkey" in config.cluster.url)
    if config.cluster.url and "valkey" in config.cluster.url:
        service = named(objects, "Service", "valkey")["metadata"]["name"]
        assert config.cluster.url == f"redis://{service}:6379/0"


def check_network_policy(policy: dict, labels: dict, ports: dict[str, int]) -> None:
    """Checks that clients reach the named ports of the proxies, and proxies each other at any port:
    a cluster member is called at a port that the system chooses."""
    spec = policy["spec"]
    clients, members = spec["ingress"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert {port["port"] for port in clients["ports"]} == set(ports)
    assert "from" not in clients
    assert "ports" not in members
    (peer,) = members["from"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_manifests_are_valid_and_consistent():
    check(manifests())


def test_two_proxies_run_and_at_least_one_stays_available():
    deployment = named(manifests(), "Deployment")
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert named(manifests(), "PodDisruptionBudget")["spec"]["minAvailable"] == 1


def test_the_kustomization_names_existing_files():
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert {*MANIFESTS, "servicemonitor.yaml"} == {*kustomization["resources"]}
    (image,) = kustomization["images"]
    used = named(manifests(), "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image["name"] == used


def test_the_service_monitor_scrapes_the_port_of_the_service():
    (monitor,) = things((FOLDER / "servicemonitor.yaml").read_text())
    jsonschema_rs.validate(MONITOR, monitor)
    service = named(manifests(), "Service")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert (
        named(manifests(), "Service", "valkey")["metadata"]["labels"]
        != service["metadata"]["labels"]
    )


def test_kubectl_builds_the_kustomization():
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    result = subprocess.run(
        [kubectl, "kustomize", FOLDER], capture_output=True, text=True, check=True
    )
    assert len(things(result.stdout)) == len(manifests()) + 1


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"serviceMonitor": {"enabled": True, "labels": {"team": "a"}}, "adminKeySecret": "k"},
        {"discovery": {"allNamespaces": True, "port": "http", "modelLabel": "m"}},
        {"discovery": {"selector": ""}, "config": '[[workers]]\nurl = "http://engine:8000"\n'},
        {"cluster": {"urlSecret": "store"}},
        {"cluster": {"urlSecret": "store"}, "adminKeySecret": "k"},
        {"cluster": {"enabled": False, "urlSecret": "store"}},
        {"cluster": {"url": "rediss://store:6379/0"}, "podDisruptionBudget": {"enabled": False}},
        {
            "cluster": {"enabled": False},
            "networkPolicy": {"enabled": False},
            "replicas": 1,
            "image": {"tag": "x"},
            "podAnnotations": {"a": "b"},
        },
        {
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "k"}],
            "imagePullSecrets": [{"name": "s"}],
        },
    ],
)
def test_the_chart_renders_valid_objects_with_any_values(values):
    check(rendered(**values))


def test_the_chart_renders_the_same_kinds_as_the_manifests():
    kinds = sorted(thing["kind"] for thing in rendered())
    assert kinds == sorted(thing["kind"] for thing in manifests())


def test_the_chart_has_the_version_of_the_program():
    chart = yaml.safe_load((FOLDER / "chart/Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("version")
    from omni_proxy import __version__

    assert chart["appVersion"] == (version or __version__)


@pytest.mark.parametrize(
    "path", sorted(Path(FOLDER / "chart/templates").glob("*.yaml")), ids=lambda path: path.name
)
def test_each_value_that_a_template_reads_is_in_the_values(path):
    import re

    values = yaml.safe_load((FOLDER / "chart/values.yaml").read_text())
    for dotted in set(re.findall(r"\.Values\.([A-Za-z.]+)", path.read_text())):
        inner = values
        for key in dotted.split("."):
            assert key in inner, dotted
            inner = inner[key]
