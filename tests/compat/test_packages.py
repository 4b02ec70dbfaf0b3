"""The distributions under packages/, as programs find them: on a path, and installed."""

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
LOOK = """
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


def looked_at(name, path, **environment):
    done = subprocess.run(
        [sys.executable, "-c", LOOK, name, *MODULES[name]],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment,
        check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_trainers_find_all_that_they_import(name):
    seen = looked_at(name, [ROOT, PACKAGES / name])
    assert (seen["same"], seen["callable"], seen["router"], seen["parsed"]) == (True, True, True, 7)
    assert seen["host"] == {"sglang_router": "0.0.0.0", "vllm_router": "127.0.0.1"}[name]
    assert seen["heavy"] == []  # a trainer that only reads flags waits for no web framework


def release(version):
    return tuple(int(part) for part in version.partition("+")[0].split("."))


def test_the_versions_choose_the_routes_that_are_served():
    versions = {name: looked_at(name, [ROOT, PACKAGES / name])["version"] for name in NAMES}
    # slime and miles take the oldest routes up to 0.2.1, and workers by their ids from 0.3.0 on.
    assert release(versions["sglang_router"]) >= (0, 3)
    assert release(versions["vllm_router"]) >= (0, 1, 17)


def test_an_image_that_asserts_a_forks_name_can_be_reported_it():
    reported = {"OMNI_PROXY_SGLANG_ROUTER_VERSION": "0.3.2+slime"}
    seen = looked_at("sglang_router", [ROOT, PACKAGES / "sglang_router"], **reported)
    assert "slime" in seen["version"]
    assert release(seen["version"]) == (0, 3, 2)


@pytest.mark.parametrize("name", NAMES)
def test_it_installs_without_a_network_and_brings_its_command(name, tmp_path):
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
    assert looked_at(name, [ROOT, target])["parsed"] == 7
    command = target / "bin" / name.replace("_", "-")
    done = subprocess.run(
        [sys.executable, command, "--version"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{target}"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("omni-proxy ")
