"""A trainer's launcher, unchanged, starts the proxy through the packages that it imports, and runs
rollouts over real replicas. `trainer_launchers` is that trainer."""

import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
import trio

from tests.ports import free_port
from tests.promises.tiny_fleet import replicas
from tests.tree import ROOT

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("soon")
PACKAGES = [ROOT, ROOT / "packages/sglang_router", ROOT / "packages/vllm_router"]


def environment(tmp_path, **more):
    path = os.pathsep.join(map(str, PACKAGES))
    return os.environ | {"PYTHONPATH": path, "XDG_STATE_HOME": str(tmp_path)} | more


@asynccontextmanager
async def trained(manner, tmp_path, new_weights, *words_of_engines):
    """What the trainer saw, the ports that its router had, and the engines."""
    ports = SimpleNamespace(router=free_port(), prometheus=free_port())
    flags = (
        f"--sglang-router-port {ports.router} --prometheus {ports.prometheus} "
        f"--weights {new_weights.path}"
    )
    async with replicas(2, *words_of_engines) as engines:
        await up(engines)
        facts = tmp_path / "facts.json"
        words = [sys.executable, "-m", "tests.promises.trainer_launchers", manner, str(facts)]
        env = environment(tmp_path, TRAINER_FLAGS=flags, TRAINER_LOG=str(tmp_path / "router.log"))
        done = await trio.run_process(
            [*words, *(each.url for each in engines)],
            env=env, cwd=ROOT, check=False, capture_stderr=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        output = done.stderr.decode()
        assert done.returncode == 0, output
        reported = json.loads(facts.read_text())
        await until_closed(ports.router)
        yield SimpleNamespace(**reported, output=output, engines={each.url for each in engines})


async def up(engines):
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        for each in engines:
            while True:
                try:
                    if (await client.get(f"{each.url}/health")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await trio.sleep(0.05)


async def until_closed(port):
    """Nothing of the router outlives it."""
    while True:
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
        except OSError:
            return
        await stream.aclose()
        await trio.sleep(0.05)


def by_session(samples):
    found = {}
    for each in samples:
        found.setdefault(each["session"], set()).add(each["worker"])
    return found


async def test_slime_starts_its_router_registers_its_engines_and_rolls_out(tmp_path, new_weights):
    async with trained("slime", tmp_path, new_weights) as seen:
        versions = [None, "step-0", "step-1", "step-2"]
        samples = [each["before"] for each in seen.rounds] + [seen.last]
        for version, round_ in zip(versions, samples, strict=True):
            assert {each["reason"] for each in round_} == {"length"}
            if version is not None:
                assert {each["version"] for each in round_} == {version}
                assert {each["header"] for each in round_} == {version}
        assert [each["aborted"] for each in seen.rounds] == [["abort"] * 4] * 3
        everything = [each for round_ in samples for each in round_]
        assert {each["worker"] for each in everything} <= seen.engines
        assert all(len(workers) == 1 for workers in by_session(everything).values())
        assert seen.metrics is True
        assert seen.end in ({"exitcode": 0, "killed": False}, {"exitcode": -9, "killed": True})
        assert "Traceback" not in seen.output


async def test_nemo_rl_starts_it_in_a_fresh_interpreter_with_an_unknown_name(tmp_path, new_weights):
    async with trained("nemo_rl", tmp_path, new_weights) as seen:
        assert {each["reason"] for each in seen.last} == {"length"}
        assert (
            seen.output.count("unknown router arguments, which have no effect: router_policy") == 1
        )


async def test_skyrl_starts_it_before_its_servers_and_keeps_each_trajectory_together(
    tmp_path, new_weights
):
    async with trained("skyrl", tmp_path, new_weights, "--dialect", "vllm") as seen:
        assert seen.is_pd is False
        samples = [each["before"] for each in seen.rounds] + [seen.last]
        for version, round_ in zip([None, "step-0", "step-1"], samples, strict=True):
            if version is not None:
                assert {each["header"] for each in round_} == {version}
        assert [each["reported"] for each in seen.rounds] == [
            [True, True, "step-0"],
            [True, True, "step-1"],
        ]
        assert seen.tokens == [{"tokens": 8, "header": "step-1"}] * 2
        assert seen.world_size == 2
        assert seen.finished == [200] * 4
        during = [each for round_ in seen.rounds for each in round_["during"]]
        assert len(during) == 64
        texts = {}
        for each in [*samples[0], *samples[1], *samples[2], *during]:
            if each["end"] is None:
                texts.setdefault((each["session"], each["header"]), set()).add(each["text"])
        # Greedy: what one version says in one session is one text, also during an update; a sample
        # that went on with other weights names both.
        assert {len(each) for each in texts.values()} == {1}
        # Before the first update the proxy may not have asked for the label yet.
        known = {"default", "step-0", "step-1", None}
        assert {each["header"] for each in during} | {each["end"] for each in during} <= known
        assert texts["t0", samples[0][0]["header"]] != texts["t0", "step-0"]
        everything = [each for round_ in samples for each in round_]
        assert all(len(workers) == 1 for workers in by_session(everything).values())
        assert "listening on http://127.0.0.1:" in seen.log
        assert "for metrics" in seen.log
        assert "Traceback" not in seen.log + seen.output
        assert seen.end in ({"exitcode": 0, "killed": False}, {"exitcode": -9, "killed": True})
