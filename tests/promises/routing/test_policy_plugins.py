"""A policy of another package works in the real program without a change of its code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from omni_proxy.cli import main
from tests.promises.support.fleet_program import (
    PATIENCE_SECS,
    program,
    put,
    starting,
    toml,
    workers,
)

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/routing.md").read_text().partition("## Write your own policy")[2]
PACKING = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
PYPROJECT = re.findall(r"^```ini\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
REFUSED = "routing.policy: the module my_policies of the policy my_policies:Packing"
BROKEN = """
from omni_proxy.routing.policies import Policy

class Broken(Policy):
    def pick(self, candidates, need):
        return candidates[len(candidates)]

    preview_pick = pick
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Installs the package shown in docs/routing.md into a separate folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    (source / "my_policies.py").write_text(PACKING)
    (source / "pyproject.toml").write_text(PYPROJECT)
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index",
            "--no-build-isolation", "--no-deps", "--target", target, source,
        ],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (target / "broken_policy.py").write_text(BROKEN)
    return target


@pytest.fixture
def on_the_path(installed, monkeypatch):
    """Puts the package on PYTHONPATH for programs and their child processes."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{installed}")


def config(fleet, policy, processes=1):
    more = f'processes = {processes}\n[routing]\npolicy = "{policy}"'
    return toml(fleet, more=more)


async def policy_of(running):
    body = await running.get_json("/status")
    assert "data_plane" in body, body
    return body["data_plane"]["policy"]


@pytest.mark.parametrize("policy", ["packing", "my_policies:Packing"])
@pytest.mark.parametrize("processes", [1, 2])
async def test_the_policy_shown_in_the_docs_routes_requests(
    on_the_path, tmp_path, policy, processes
):
    file = tmp_path / "proxy.toml"
    async with workers("one", "two") as fleet:
        put(file, config(fleet, policy, processes))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            served_by = [(await running.ask()).json()["worker"] for _ in range(4)]
            assert served_by == ["one"] * 4  # sequential requests: the first worker always has room
            response = await running.client.post("/explain", json={"messages": []})
            assert response.json()["policy"] == policy
            assert response.json()["pick"]["reason"] == "the first with room: 0 in flight"
            assert (await policy_of(running))["name"] == policy


async def test_a_reload_switches_to_a_plugin_policy_and_back(on_the_path, tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("one", "two") as fleet:
        put(file, config(fleet, "round_robin"))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            put(file, config(fleet, "packing"))
            await running.until(
                "/status", lambda body: body["data_plane"]["policy"]["name"] == "packing"
            )
            assert {(await running.ask()).json()["worker"] for _ in range(4)} == {"one"}
            assert (await policy_of(running))["packing_picks"] == 4
            put(file, config(fleet, "round_robin"))
            await running.until(
                "/status", lambda body: body["data_plane"]["policy"]["name"] == "round_robin"
            )
            assert {(await running.ask()).json()["worker"] for _ in range(4)} == {"one", "two"}


async def test_a_reload_with_a_policy_that_cannot_be_loaded_changes_nothing(on_the_path, tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("one") as fleet:
        put(file, config(fleet, "packing"))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            put(file, config(fleet, "nowhere_to_be_found:Policy"))
            body = await running.until(
                "/config", lambda body: body["last_reload"]["outcome"] == "refused"
            )
            (problem,) = body["last_reload"]["error"]["problems"]
            assert problem["path"] == "routing.policy"
            assert "nowhere_to_be_found" in problem["reason"]
            assert "PYTHONPATH" in problem["hint"]
            assert (await policy_of(running))["name"] == "packing"


async def test_no_request_fails_if_the_policy_raises(on_the_path, tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("one", "two") as fleet:
        put(file, config(fleet, "broken_policy:Broken"))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            for _ in range(6):
                assert (await running.ask()).status_code == 200
            assert (await policy_of(running))["policy_failures"] == 6
            assert running.log.count("policy_failed policy=broken_policy:Broken method=pick") == 1


async def test_a_missing_policy_is_rejected_before_anything_starts(tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text('[routing]\npolicy = "my_policies:Packing"\n')
    async with starting("--config", file) as running:
        with trio.fail_after(PATIENCE_SECS):
            assert await running.process.wait() == 2
        await running.until_logged("put its folder on PYTHONPATH")
        assert REFUSED in running.log


@pytest.mark.parametrize("policy", ["packing", "my_policies:Packing"])
def test_a_new_interpreter_finds_the_policy_too(installed, tmp_path, policy):
    """Other tests fork their programs, which imitates the `sys.path` of a new interpreter."""
    file = tmp_path / "proxy.toml"
    file.write_text(f'[routing]\npolicy = "{policy}"\n')
    path = f"{ROOT}{os.pathsep}{installed}"
    done = subprocess.run(
        [sys.executable, "-m", "omni_proxy", "check", file], cwd=ROOT, timeout=PATIENCE_SECS,
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_check_command_rejects_a_missing_policy(tmp_path, capsys):
    file = tmp_path / "proxy.toml"
    file.write_text('[routing]\npolicy = "my_policies:Packing"\n')
    assert main(["check", str(file)]) == 2
    stderr = capsys.readouterr().err
    assert REFUSED in stderr
    assert "put its folder on PYTHONPATH" in stderr
