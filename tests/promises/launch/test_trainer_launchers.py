"""Trainers' unmodified launchers start the proxy through the packages that they import, and run
rollouts over real replicas. `trainer_launchers` imitates those trainers."""

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
from tests.promises.support.sync_program import PATIENCE_SECS
from tests.promises.support.tiny_fleet import replicas
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
async def trained(framework, tmp_path, new_weights, *engine_arguments):
    """Runs a trainer; yields its results, its output and the URLs of its engines."""
    ports = SimpleNamespace(router=free_port(), prometheus=free_port())
    flags = (
        f"--sglang-router-port {ports.router} --prometheus {ports.prometheus} "
        f"--weights {new_weights.path}"
    )
    async with replicas(2, *engine_arguments) as engines:
        await until_healthy(engines)
        facts = tmp_path / "facts.json"
        command = [
            sys.executable,
            "-m",
            "tests.promises.support.trainer_launchers",
            framework,
            str(facts),
        ]
        env = environment(tmp_path, TRAINER_FLAGS=flags, TRAINER_LOG=str(tmp_path / "router.log"))
        done = await trio.run_process(
            [*command, *(engine.url for engine in engines)],
            env=env, cwd=ROOT, check=False, capture_stderr=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        output = done.stderr.decode()
        assert done.returncode == 0, output
        results = json.loads(facts.read_text())
        await until_closed(ports.router)
        yield SimpleNamespace(**results, output=output, engines={engine.url for engine in engines})


async def until_healthy(engines):
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        with trio.fail_after(PATIENCE_SECS):
            for engine in engines:
                while not await is_healthy(client, engine):
                    await trio.sleep(0.05)


async def is_healthy(client, engine):
    try:
        return (await client.get(f"{engine.url}/health")).status_code == 200
    except httpx.TransportError:
        return False


async def until_closed(port):
    """Waits until the router's port is closed."""
    with trio.fail_after(PATIENCE_SECS):
        while True:
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
            except OSError:
                return
            await stream.aclose()
            await trio.sleep(0.05)


def workers_by_session(samples):
    workers = {}
    for sample in samples:
        workers.setdefault(sample["session"], set()).add(sample["worker"])
    return workers


async def test_slime_starts_its_router_registers_its_engines_and_runs_rollouts(
    tmp_path, new_weights
):
    async with trained("slime", tmp_path, new_weights) as trainer:
        versions = [None, "step-0", "step-1", "step-2"]
        samples = [rollout["before"] for rollout in trainer.rounds] + [trainer.last]
        for version, round_ in zip(versions, samples, strict=True):
            assert {sample["reason"] for sample in round_} == {"length"}
            if version is not None:
                assert {sample["version"] for sample in round_} == {version}
                assert {sample["header"] for sample in round_} == {version}
        assert [rollout["aborted"] for rollout in trainer.rounds] == [["abort"] * 4] * 3
        all_samples = [sample for round_ in samples for sample in round_]
        assert {sample["worker"] for sample in all_samples} <= trainer.engines
        assert all(len(workers) == 1 for workers in workers_by_session(all_samples).values())
        assert trainer.metrics is True
        assert trainer.end in ({"exitcode": 0, "killed": False}, {"exitcode": -9, "killed": True})
        assert "Traceback" not in trainer.output


async def test_nemo_rl_starts_the_router_in_a_new_interpreter_with_an_unknown_argument(
    tmp_path, new_weights
):
    async with trained("nemo_rl", tmp_path, new_weights) as trainer:
        assert {sample["reason"] for sample in trainer.last} == {"length"}
        assert (
            trainer.output.count("unknown router arguments, which have no effect: router_policy")
            == 1
        )


async def test_skyrl_starts_the_router_before_its_servers_and_keeps_trajectories_together(
    tmp_path, new_weights
):
    async with trained("skyrl", tmp_path, new_weights, "--dialect", "vllm") as trainer:
        assert trainer.is_pd is False
        samples = [rollout["before"] for rollout in trainer.rounds] + [trainer.last]
        for version, round_ in zip([None, "step-0", "step-1"], samples, strict=True):
            if version is not None:
                assert {sample["header"] for sample in round_} == {version}
        assert [rollout["reported"] for rollout in trainer.rounds] == [
            [True, True, "step-0"],
            [True, True, "step-1"],
        ]
        assert trainer.tokens == [{"tokens": 8, "header": "step-1"}] * 2
        assert trainer.world_size == 2
        assert trainer.finished == [200] * 4
        during = [sample for round_ in trainer.rounds for sample in round_["during"]]
        assert len(during) == 64
        texts = {}
        for sample in [*samples[0], *samples[1], *samples[2], *during]:
            if sample["end"] is None:
                texts.setdefault((sample["session"], sample["header"]), set()).add(sample["text"])
        # Decoding is greedy: one version gives one text in a session, also during an update. A
        # sample that continued with other weights has both labels and is left out.
        assert {len(values) for values in texts.values()} == {1}
        # Before the first update, the proxy may not have read the label yet.
        known = {"default", "step-0", "step-1", None}
        assert {sample["header"] for sample in during} | {
            sample["end"] for sample in during
        } <= known
        assert texts["t0", samples[0][0]["header"]] != texts["t0", "step-0"]
        all_samples = [sample for round_ in samples for sample in round_]
        assert all(len(workers) == 1 for workers in workers_by_session(all_samples).values())
        assert "listener_opened url=http://127.0.0.1:" in trainer.log
        assert "purpose=metrics" in trainer.log
        assert "Traceback" not in trainer.log + trainer.output
        assert trainer.end in ({"exitcode": 0, "killed": False}, {"exitcode": -9, "killed": True})
