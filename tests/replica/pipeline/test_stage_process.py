"""Stages in real child processes, which end in different ways."""

import os
import signal
import subprocess
import sys

import httpx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.pipeline import stage_process
from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.requests import GenerateRequest, RequestFailed
from omni_proxy.replica.pipeline.runtime import open_pipeline
from omni_proxy.replica.pipeline.stage_process import (
    FrameDecoder,
    FrameError,
    command,
    encode_frame,
)
from tests.ports import free_port
from tests.process_group.trainer_process import TrainerPool
from tests.replica.pipeline.pipeline_stages import pipeline, stage, until
from tests.replica.weights.sync_steps import NORM, UP, bucket_of, multi_bucket

PATIENCE_SECS = 60
BLOCKED_THREADS = "threads_blocked_at_exit reason=peer_does_not_answer threads="
BUCKET = bucket_of([UP, NORM])
PARENT = """
import os, sys, trio
from omni_proxy.replica.pipeline.runtime import open_pipeline
from tests.replica.pipeline.pipeline_stages import pipeline, stage

async def main():
    config = pipeline(stage("a", "until_aborted", terminal=True, process="p"))
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        print(runtime.hosts[0].pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""
EXITING_PROGRAM = """
import sys, threading
from omni_proxy.replica.pipeline.stage_process import exit_process
for name in ("weights-init-a", "weights-receive-b", "other"):
    threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()
print("last words")
exit_process(3)
"""


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(1, 9))
def test_frames_are_decoded_for_any_chunking(bodies, step):
    stream = b"".join(encode_frame(body) for body in bodies)
    decoder, decoded = FrameDecoder(), []
    for start in range(0, len(stream), step):
        decoded += decoder.feed(stream[start : start + step])
    assert [stage_process.msgspec.msgpack.decode(body) for body in decoded] == bodies


def test_a_length_past_the_limit_is_refused_before_its_bytes():
    with pytest.raises(FrameError, match="over the bound"):
        list(FrameDecoder().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize("message", [object(), 1 << 70, {"a": {1, 2}.__iter__()}])
def test_a_message_that_msgpack_cannot_encode_is_refused(message):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        encode_frame(message)


def test_a_message_past_the_bound_is_refused(monkeypatch):
    monkeypatch.setattr(stage_process, "MAX_BYTES", 8)
    with pytest.raises(ValueError, match="over the bound of 8"):
        encode_frame(b"123456789")


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def two_stages_in_one_process():
    return pipeline(
        stage("a", next=("b",), process="p"),
        stage("b", terminal=True, process="p", env={"OMNI_TEST": "own"}),
    )


@pytest.mark.usefixtures("soon")
async def test_stages_share_a_process_that_ends_with_the_pipeline():
    async with open_pipeline(two_stages_in_one_process()) as (hub, runtime):
        await runtime.ready.wait()
        (host,) = runtime.hosts
        pid = host.pid
        result = await Client(hub).completion(GenerateRequest("hi"))
        assert (result.text, result.extra["pid"]) == ("HI", pid)
        assert pid != os.getpid()
    assert has_ended(pid)


@pytest.mark.usefixtures("soon")
async def test_a_process_has_the_environment_of_its_stages():
    config = pipeline(
        stage(
            "a",
            "environment",
            terminal=True,
            process="p",
            env={"OMNI_TEST": "own"},
            params={"name": "OMNI_TEST"},
        )
    )
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        assert (await Client(hub).completion(GenerateRequest(""))).text == "own"
    assert "OMNI_TEST" not in os.environ


@pytest.mark.usefixtures("soon")
async def test_a_killed_process_fails_its_requests_and_restarts():
    config = pipeline(
        stage("a", "until_aborted", terminal=True, process="p"),
        stage("other", terminal=True),
        entries={"tts": "other"},
    )
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        client = Client(hub)
        async with client.generate(GenerateRequest("x"), "r") as generation:
            assert (await anext(generation)).text == "begun"
            first = runtime.hosts[1].pid
            os.kill(first, signal.SIGKILL)
            with pytest.raises(
                RequestFailed, match="stage a ended: process p was ended by SIGKILL"
            ):
                await anext(generation)
        assert client.health()["status"] == "unhealthy"
        assert "SIGKILL" in client.health()["failed_stages"]["a"]
        with pytest.raises(RequestFailed, match="stage a is not running") as caught:
            await client.completion(GenerateRequest("x"))
        assert caught.value.status == 503
        # The other stage still serves.
        assert (await client.completion(GenerateRequest("hi", task="tts"))).text == "HI"
        await until(lambda: client.health()["status"] == "healthy")
        assert runtime.hosts[1].pid not in (None, first)
        async with client.generate(GenerateRequest("x"), "r") as generation:
            assert (await anext(generation)).text == "begun"


@pytest.mark.usefixtures("soon")
async def test_a_process_that_does_not_respond_is_killed_at_the_end():
    async with open_pipeline(two_stages_in_one_process()) as (hub, runtime):
        await runtime.ready.wait()
        pid = runtime.hosts[0].pid
        os.kill(pid, signal.SIGSTOP)
        hub.stop()
        runtime.stop_waiting()
    assert has_ended(pid)


@pytest.mark.usefixtures("soon")
async def test_a_stage_process_ignores_sigint_and_sigterm():
    async with open_pipeline(two_stages_in_one_process()) as (hub, runtime):
        await runtime.ready.wait()
        pid = runtime.hosts[0].pid
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert (await Client(hub).completion(GenerateRequest("hi"))).extra["pid"] == pid


@pytest.mark.usefixtures("soon")
async def test_a_child_does_not_outlive_a_parent_that_is_killed():
    parent = await trio.lowlevel.open_process(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE
    )
    async with parent.stdout:
        child = int(await parent.stdout.receive_some(100))
        assert not has_ended(child)
        parent.kill()
        await parent.wait()
        # Its adoptive parent reaps it at some later time, so it may remain a zombie.
        await until(lambda: has_ended(child) or state_of(child) == "Z")


def state_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


@pytest.mark.usefixtures("soon")
async def test_a_result_that_cannot_be_encoded_fails_only_its_request():
    config = pipeline(
        stage("a", "unsendable", terminal=True, process="p"),
        stage("b", process="p", terminal=True),
        entries={"tts": "b"},
    )
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        client = Client(hub)
        with pytest.raises(RequestFailed, match="cannot be encoded"):
            await client.completion(GenerateRequest("x"))
        assert (await client.completion(GenerateRequest("hi", task="tts"))).text == "HI"


@pytest.mark.usefixtures("soon")
async def test_a_request_that_cannot_be_encoded_fails_alone():
    async with open_pipeline(two_stages_in_one_process()) as (hub, runtime):
        await runtime.ready.wait()
        client = Client(hub)
        with pytest.raises(RequestFailed, match="cannot be sent") as caught:
            await client.completion(GenerateRequest({"x": object()}))
        assert caught.value.status == 500
        assert (await client.completion(GenerateRequest("hi"))).text == "HI"


@pytest.mark.usefixtures("soon")
async def test_an_abort_reaches_a_stage_in_its_process(tmp_path):
    config = pipeline(
        stage("a", "until_aborted", terminal=True, process="p", params={"folder": str(tmp_path)})
    )
    async with open_pipeline(config) as (hub, runtime):
        await runtime.ready.wait()
        async with Client(hub).generate(GenerateRequest("x"), "r") as generation:
            await anext(generation)
        await until(lambda: (tmp_path / "r").exists() and (tmp_path / "r").read_text())
    assert (tmp_path / "r").read_text() == "aborted\n"


@pytest.mark.usefixtures("soon")
async def test_a_megabyte_can_be_sent_in_both_directions():
    text = "ab" * 500_000
    async with open_pipeline(two_stages_in_one_process()) as (hub, runtime):
        await runtime.ready.wait()
        assert (await Client(hub).completion(GenerateRequest(text))).text == text.upper()


def test_a_single_file_build_starts_a_child_through_its_own_command(monkeypatch):
    assert command(5) == [sys.executable, "-m", "omni_proxy", "replica", "stage-process", "5"]
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert command(5) == [sys.executable, "replica", "stage-process", "5"]


@pytest.fixture
def trainer():
    pool = TrainerPool()
    yield pool.trainer()
    pool.close()


@pytest.fixture(params=[(), ("--own-process", "decode")], ids=["one process", "two processes"])
def replica(request):
    """A replica process that receives weights in its own threads, and its URL."""
    port = free_port()
    argv = [sys.executable, "-m", "omni_proxy", "replica", "--engine", "torch", "--model", "tiny"]
    argv += ["--port", str(port), "--weights-isolation", "thread", *request.param]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = ""
            while "replica_ready" not in line:
                line = process.stderr.readline()
                assert line, "the replica exited before it was ready"
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def post(url, path, **body):
    response = httpx.post(url + path, json=body, timeout=PATIENCE_SECS)
    assert response.status_code == 200, response.text


def test_a_stopped_replica_exits_with_0_while_a_silent_trainer_blocks_a_thread(replica, trainer):
    process, url = replica
    port = trainer.tell("open", group="g")["port"]
    store = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    group = {"group_name": "g", "backend": "gloo", "rank_offset": 1}
    post(url, "/init_weights_update_group", **store, **group)
    assert trainer.reply() == {"joined": True}
    post(url, "/prepare_weights_update", **multi_bucket(BUCKET))
    trainer.process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=PATIENCE_SECS)
    assert process.returncode == 0
    (line,) = [line for line in stderr.splitlines() if BLOCKED_THREADS in line]
    assert line.endswith(BLOCKED_THREADS + "weights-receive-g")


def run_exiting_program(**streams):
    argv = [sys.executable, "-c", EXITING_PROGRAM]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        argv, env=environment, text=True, timeout=PATIENCE_SECS, check=False, **streams
    )


def test_exit_flushes_output_and_reports_blocked_threads_in_one_line():
    process = run_exiting_program(capture_output=True)
    assert (process.returncode, process.stdout) == (3, "last words\n")
    assert process.stderr == BLOCKED_THREADS + "weights-init-a,weights-receive-b\n"


def test_a_process_whose_output_has_no_reader_exits_with_its_status():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run_exiting_program(stdout=writer, stderr=writer).returncode == 3
    finally:
        os.close(writer)
