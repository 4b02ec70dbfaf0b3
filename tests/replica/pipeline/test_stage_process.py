"""Stages in real child processes, which end in different ways."""

import os
import signal
import subprocess
import sys

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
from tests.replica.pipeline.pipeline_stages import pipeline, stage, until

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
