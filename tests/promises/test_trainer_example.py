"""The program of docs/trainers.md, as it stands there, at a proxy with two real replicas."""

import os
import re
import sys
from functools import partial

import pytest
import trio

from tests.promises.fleet_program import program
from tests.promises.tiny_fleet import known, replicas, toml
from tests.tree import ROOT

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")


async def test_the_trainer_of_the_page_updates_both_replicas_and_is_answered_by_them(tmp_path):
    text = (ROOT / "docs/trainers.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    file = tmp_path / "proxy.toml"
    with trio.fail_after(90):
        async with replicas(2) as both:
            file.write_text(toml(both, 'drain_secs = 5\nwhile_updating = "hold"'))
            async with program("--config", file) as running:
                await known(running, 2)
                env = {
                    **os.environ, "PROXY": str(running.client.base_url), "PYTHONPATH": str(ROOT),
                    "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1",
                }  # fmt: skip
                run = partial(trio.run_process, env=env, capture_stdout=True, capture_stderr=True)
                done = await run([sys.executable, "-c", example], check=False)
                assert done.returncode == 0, done.stderr.decode()
                versions, answered_by = done.stdout.decode().splitlines()
                assert versions == str({each.url: "step-1" for each in both})
                assert answered_by == "step-1"
                assert (await running.told("/weights"))["weight_epoch"] == 1
