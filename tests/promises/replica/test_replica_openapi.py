"""Schemathesis checks the OpenAPI description of a replica against the running program."""

import json
import re
import subprocess
import sys

import trio

from tests.example_counts import thorough
from tests.promises.support import replica_program
from tests.promises.support.replica_program import PATIENCE_SECS, healthy, program

CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance"
# Routes that wait for a trainer or stop other requests: groups, pauses, prepared updates.
EXCLUDED = "group|prepare_|complete_|distributed|from_disk|/pause|/sleep|profile|transfer_engine"


async def test_every_route_of_a_replica_responds_as_its_description_declares(tmp_path, monkeypatch):
    # Limits generations whose request has no limit.
    short = replica_program.PIPELINE.replace("threads = 1", "threads = 1, max_total_tokens = 256")
    monkeypatch.setattr(replica_program, "PIPELINE", short)
    with program(tmp_path) as running:
        async with running.client() as client:
            await healthy(client)
            description = (await client.get("/openapi.json")).json()
            path_of_description = tmp_path / "openapi.json"
            path_of_description.write_text(json.dumps(description))
            command = [
                sys.executable, "-m", "schemathesis.cli", "run", str(path_of_description),
                "--url", running.url, "--checks", CHECKS, "--generation-deterministic",
                "--phases", "fuzzing", "--max-examples", "8" if thorough() else "3", "--request-timeout", "20",
                "--continue-on-failure", "--no-shrink", "--suppress-health-check", "all",
                "--no-color", "--exclude-path-regex", EXCLUDED,
            ]  # fmt: skip
            with trio.fail_after(PATIENCE_SECS):
                done = await trio.run_process(
                    command, cwd=tmp_path, check=False,
                    capture_stdout=True, stderr=subprocess.STDOUT,
                )  # fmt: skip
            output = done.stdout.decode()
            assert done.returncode == 0, output[-10000:]
            paths = [path for path in description["paths"] if not re.search(EXCLUDED, path)]
            tested = int(re.search(r"Tested: (\d+)", output)[1])
            assert tested == sum(len(description["paths"][path]) for path in paths) > 30
            assert (await client.get("/health")).status_code == 200
