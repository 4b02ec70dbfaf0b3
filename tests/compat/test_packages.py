"""The distributions under packages/, imported from a path and after installation."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.tree import ROOT

PACKAGES = ROOT / "packages"
NAMES = ("sglang_router", "vllm_router")
MODULES = {
    "sglang_router": ("launch_router", "router_args", "router", "version", "launch_server", "cli"),
    "vllm_router": ("launch_router", "router_args", "router", "version"),
}
IMPORTER = """
import importlib, json, sys
name, *modules = sys.argv[1:]
package = importlib.import_module(name)
seen = {module: vars(importlib.import_module(f"{name}.{module}")) for module in modules}
launch = seen["launch_router"]
print(json.dumps({
    "version": package.__version__,
    "same": launch["RouterArgs"] is seen["router_args"]["RouterArgs"],
    "host": launch["RouterArgs"]().host,
    "callable": callable(launch["launch_router"]) and callable(launch["main"]),
    "parsed": launch["parse_router_args"](["--port", "7"]).port,
    "router": launch["Router"] is seen["router"]["Router"],
    "heavy": sorted({"quart", "torch", "trio", "httpx"} & sys.modules.keys()),
}))
"""


def import_package(name, path, **environment):
    result = subprocess.run(
        [sys.executable, "-c", IMPORTER, name, *MODULES[name]],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment,
        check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_all_modules_that_trainers_import_exist(name):
    facts = import_package(name, [ROOT, PACKAGES / name])
    assert (facts["same"], facts["callable"], facts["router"], facts["parsed"]) == (
        True,
        True,
        True,
        7,
    )
    assert facts["host"] == {"sglang_router": "0.0.0.0", "vllm_router": "127.0.0.1"}[name]
    assert facts["heavy"] == []  # a trainer that only parses flags imports no web framework


def release(version):
    return tuple(int(part) for part in version.partition("+")[0].split("."))


def test_the_versions_make_trainers_choose_supported_routes():
    versions = {name: import_package(name, [ROOT, PACKAGES / name])["version"] for name in NAMES}
    # slime and miles use the oldest routes up to 0.2.1, and worker ids since 0.3.0.
    assert release(versions["sglang_router"]) >= (0, 3)
    assert release(versions["vllm_router"]) >= (0, 1, 17)


def test_the_reported_version_can_be_set_for_images_that_check_for_a_fork():
    environment = {"OMNI_PROXY_SGLANG_ROUTER_VERSION": "0.3.2+slime"}
    facts = import_package("sglang_router", [ROOT, PACKAGES / "sglang_router"], **environment)
    assert "slime" in facts["version"]
    assert release(facts["version"]) == (0, 3, 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_package_installs_offline_with_its_command(name, tmp_path):
    source, target = tmp_path / name, tmp_path / "site"
    shutil.copytree(PACKAGES / name, source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--target",
    ]
    subprocess.run([sys.executable, *pip, str(target), str(source)], check=True)
    assert import_package(name, [ROOT, target])["parsed"] == 7
    command = target / "bin" / name.replace("_", "-")
    result = subprocess.run(
        [sys.executable, command, "--version"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{target}"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert result.stdout.startswith("omni-proxy ")
