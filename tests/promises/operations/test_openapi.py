"""Schemathesis checks the OpenAPI description of the proxy against the running program."""

import json
import os
import re
import subprocess
import sys

import trio

from tests.example_counts import thorough
from tests.promises.support.fakes import counted, fake_workers
from tests.promises.support.fleet_program import program, toml
from tests.tree import ROOT

PATIENCE_SECS = 90  # a deadline for a hung test, not a claim about speed
KEY = "k"
ADMIN = f'[admin]\napi_key = "{KEY}"\n'
UNREACHABLE = "http://127.0.0.1:9"
CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "ignored_auth",
)
# An endless stream, and a route that waits 30 s for a worker that does not exist.
EXCLUDED = ("--exclude-path=/feed", "--exclude-path=/add_worker")


async def engine(call):
    """A worker that accepts every request."""
    await call.send(
        counted(b'{"success": true, "message": "ok"}', "content-type: application/json")
    )


def narrowed(description, member, *spares):
    """Limits URLs in the description to the fleet or closed ports; routes may remove `spares`."""
    common_choices = {
        ("query", "selector"): ["worker_type=regular", f"url={member}", "health in (dead)"],
        ("query", "path"): ["/v1/chat/completions", "/v1/audio/speech", "/generate", "/nowhere"],
        ("path", "worker_id"): [member, UNREACHABLE],
    }
    operation_choices = {
        ("delete", "/workers/{worker_id}"): {("path", "worker_id"): [spares[0], UNREACHABLE]},
        ("post", "/remove_worker"): {("query", "url"): [spares[1], UNREACHABLE]},
        ("post", "/workers"): {("query", "url"): [f"http://127.0.1.{n}:9" for n in range(1, 9)]},
    }
    description["components"]["schemas"]["Switches"]["properties"]["url"] = {"const": member}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            choices = {**common_choices, **operation_choices.get((method, path), {})}
            for parameter in operation.get("parameters", ()):
                if choice := choices.get((parameter["in"], parameter["name"])):
                    parameter["schema"] = {"type": "string", "enum": choice}
                    parameter["required"] = parameter["required"] or parameter["name"] == "url"
    return description


# The coverage phase tests each limit of each parameter and sends most of the requests. Values that
# the description excludes are left to --thorough; the fuzzing phase has some of them.
POSITIVE_ONLY = '[phases.coverage.generation]\nmode = "positive"\n'


async def run_schemathesis(running, description, folder, *arguments):
    """Returns how many routes schemathesis tested. Raises AssertionError with its output."""
    path = folder / "openapi.json"
    path.write_text(json.dumps(description))
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", str(path),
        "--url", str(running.client.base_url), "--header", f"Authorization: Bearer {KEY}",
        "--checks", ",".join(CHECKS), "--generation-deterministic", "--request-timeout", "15",
        "--continue-on-failure", "--no-shrink", "--suppress-health-check", "all", "--no-color",
        *EXCLUDED, *arguments,
    ]  # fmt: skip
    # Hypothesis takes seconds to compute its character table, and caches it in this folder.
    env = {"HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis"), **os.environ}
    with trio.fail_after(PATIENCE_SECS):
        done = await trio.run_process(
            command,
            cwd=folder,
            env=env,
            check=False,
            capture_stdout=True,
            stderr=subprocess.STDOUT,
        )
    output = done.stdout.decode()
    assert done.returncode == 0, output[-20000:]
    assert (await running.client.get("/live")).status_code == 200
    return int(re.search(r"Tested: (\d+)", output)[1])


async def test_every_route_responds_as_its_description_declares(tmp_path):
    async with fake_workers(engine, engine, engine) as fleet:
        file = tmp_path / "proxy.toml"
        file.write_text(toml(fleet) + ADMIN)
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            served = await running.get_json("/openapi.json")
            description = narrowed(served, *(worker.url for worker in fleet))
            arguments = (
                "--phases",
                "coverage,fuzzing",
                "--max-examples",
                "10" if thorough() else "2",
            )
            if not thorough():
                (tmp_path / "schemathesis.toml").write_text(POSITIVE_ONLY)
            count = await run_schemathesis(running, description, tmp_path, *arguments)
            assert count == sum(map(len, description["paths"].values())) - len(EXCLUDED)
            assert len(fleet[0].requests) > (100 if thorough() else 20)  # workers received requests


async def test_every_route_responds_as_declared_without_workers(tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text(toml([]) + ADMIN)
    async with program("--config", file) as running:
        description = narrowed(
            await running.get_json("/openapi.json"), UNREACHABLE, UNREACHABLE, UNREACHABLE
        )
        del description["paths"]["/workers"]["post"]  # would add workers
        arguments = ("--phases", "fuzzing", "--max-examples", "2" if thorough() else "1")
        arguments += ("--mode", "positive")
        assert await run_schemathesis(running, description, tmp_path, *arguments) > 50
