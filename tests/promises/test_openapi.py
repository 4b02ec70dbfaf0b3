"""What the front says of itself holds: asked by schemathesis, of the real program."""

import json
import os
import re
import subprocess
import sys

import trio

from tests.example_counts import thorough
from tests.promises.fakes import counted, fake_workers
from tests.promises.fleet_program import program, toml
from tests.tree import ROOT

PATIENCE_SECS = 90  # a deadline for a hung test, not a claim about speed
KEY = "k"
ADMIN = f'[admin]\napi_key = "{KEY}"\n'
NOBODY = "http://127.0.0.1:9"
CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "ignored_auth",
)
# What it leaves out: a stream without an end, and a wait of 30 s for a worker that is not there.
LEFT_OUT = ("--exclude-path=/feed", "--exclude-path=/add_worker")


async def engine(call):
    """A worker that says yes to everything."""
    await call.send(
        counted(b'{"success": true, "message": "ok"}', "content-type: application/json")
    )


def about_these(reported, kept, *spares):
    """The description, narrowed to workers that are there or refuse; `spares` may go."""
    of_all = {
        ("query", "selector"): ["worker_type=regular", f"url={kept}", "health in (dead)"],
        ("query", "path"): ["/v1/chat/completions", "/v1/audio/speech", "/generate", "/nowhere"],
        ("path", "worker_id"): [kept, NOBODY],
    }
    of_one = {
        ("delete", "/workers/{worker_id}"): {("path", "worker_id"): [spares[0], NOBODY]},
        ("post", "/remove_worker"): {("query", "url"): [spares[1], NOBODY]},
        ("post", "/workers"): {("query", "url"): [f"http://127.0.1.{n}:9" for n in range(1, 9)]},
    }
    reported["components"]["schemas"]["Switches"]["properties"]["url"] = {"const": kept}
    for path, methods in reported["paths"].items():
        for method, operation in methods.items():
            choices = {**of_all, **of_one.get((method, path), {})}
            for given in operation.get("parameters", ()):
                if choice := choices.get((given["in"], given["name"])):
                    given["schema"] = {"type": "string", "enum": choice}
                    given["required"] = given["required"] or given["name"] == "url"
    return reported


# The coverage phase asks for each bound of each parameter, by far most of all requests. Those with
# what the description excludes are left to --thorough; the fuzzing phase has some of them.
SHORT = '[phases.coverage.generation]\nmode = "positive"\n'


async def asked(running, reported, folder, *words):
    """How many routes schemathesis has asked. Raises AssertionError with its words on a fault."""
    described = folder / "openapi.json"
    described.write_text(json.dumps(reported))
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", str(described),
        "--url", str(running.client.base_url), "--header", f"Authorization: Bearer {KEY}",
        "--checks", ",".join(CHECKS), "--generation-deterministic", "--request-timeout", "15",
        "--continue-on-failure", "--no-shrink", "--suppress-health-check", "all", "--no-color",
        *LEFT_OUT, *words,
    ]  # fmt: skip
    # Which characters there are takes seconds to find out, and is kept there for the next process.
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
    body = done.stdout.decode()
    assert done.returncode == 0, body[-20000:]
    assert (await running.client.get("/live")).status_code == 200
    return int(re.search(r"Tested: (\d+)", body)[1])


async def test_every_route_answers_as_its_description_declares(tmp_path):
    async with fake_workers(engine, engine, engine) as fleet:
        file = tmp_path / "proxy.toml"
        file.write_text(toml(fleet) + ADMIN)
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            served = await running.get_json("/openapi.json")
            reported = about_these(served, *(worker.url for worker in fleet))
            words = ("--phases", "coverage,fuzzing", "--max-examples", "10" if thorough() else "2")
            if not thorough():
                (tmp_path / "schemathesis.toml").write_text(SHORT)
            count = await asked(running, reported, tmp_path, *words)
            assert count == sum(map(len, reported["paths"].values())) - len(LEFT_OUT)
            assert len(fleet[0].requests) > (100 if thorough() else 20)  # the routes did reach it


async def test_every_route_does_so_without_a_worker_too(tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text(toml([]) + ADMIN)
    async with program("--config", file) as running:
        reported = about_these(await running.get_json("/openapi.json"), NOBODY, NOBODY, NOBODY)
        del reported["paths"]["/workers"]["post"]  # it would not stay without one
        words = ("--phases", "fuzzing", "--max-examples", "2" if thorough() else "1")
        words += ("--mode", "positive")
        assert await asked(running, reported, tmp_path, *words) > 50
