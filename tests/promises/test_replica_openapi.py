"""What a replica says of its routes holds: asked by schemathesis, of the real program."""

import json
import re
import subprocess
import sys

import trio

from tests.example_counts import thorough
from tests.promises import replica_program
from tests.promises.replica_program import PATIENCE_SECS, healthy, program

CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance"
# What waits for a trainer, or stops all others where it is asked to: groups, pauses, kept ones.
LEFT_OUT = "group|prepare_|complete_|distributed|from_disk|/pause|/sleep|profile|transfer_engine"


async def test_every_route_of_a_replica_answers_as_its_description_declares(tmp_path, monkeypatch):
    # An answer without a bound of its own ends soon.
    short = replica_program.PIPELINE.replace("threads = 1", "threads = 1, max_total_tokens = 256")
    monkeypatch.setattr(replica_program, "PIPELINE", short)
    with program(tmp_path) as running:
        async with running.client() as client:
            await healthy(client)
            body = (await client.get("/openapi.json")).json()
            described = tmp_path / "openapi.json"
            described.write_text(json.dumps(body))
            command = [
                sys.executable, "-m", "schemathesis.cli", "run", str(described),
                "--url", running.url, "--checks", CHECKS, "--generation-deterministic",
                "--phases", "fuzzing", "--max-examples", "8" if thorough() else "3", "--request-timeout", "20",
                "--continue-on-failure", "--no-shrink", "--suppress-health-check", "all",
                "--no-color", "--exclude-path-regex", LEFT_OUT,
            ]  # fmt: skip
            with trio.fail_after(PATIENCE_SECS):
                done = await trio.run_process(
                    command, cwd=tmp_path, check=False,
                    capture_stdout=True, stderr=subprocess.STDOUT,
                )  # fmt: skip
            output = done.stdout.decode()
            assert done.returncode == 0, output[-10000:]
            paths = [path for path in body["paths"] if not re.search(LEFT_OUT, path)]
            asked = int(re.search(r"Tested: (\d+)", output)[1])
            assert asked == sum(len(body["paths"][path]) for path in paths) > 30
            assert (await client.get("/health")).status_code == 200
