import os
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from omni_proxy.system import memory
from tests.replica.tp.conftest import RANKS
from tests.replica.tp.test_operations import assert_checksums, update_from_tensor
from tests.replica.weights.stage_fixture import weights_of
from tests.replica.weights.sync_steps import (
    DOWN,
    NORM,
    SHAPES,
    UP,
    Meminfo,
    Syncing,
    bucket_of,
    expected_values,
    multi_bucket,
    single_bucket,
)

A, B = bucket_of([UP, NORM]), bucket_of([DOWN], seed=7)


@pytest.fixture
def sync(pair, pool):
    """Two ranks and a trainer in a group. Afterwards the ranks have their first weights again."""
    sync = Syncing(pair, pool.trainer(), ranks=2)
    sync.join()
    yield sync
    pair.admin("destroy_weights_update_group", group_name="g")
    if sync.trainer.living():
        sync.trainer.tell("destroy", group="g")
    assert update_from_tensor(pair, weights_of(0)).success
    pair.admin("continue_generation")


def ranks_of(result):
    return [(entry["rank"], entry["success"]) for entry in result.data["rank_results"]]


def states(stage):
    return [entry["data"]["weight_sync"]["state"] for entry in stage.facts()["rank_results"]]


@pytest.mark.parametrize("flattened", [False, True])
def test_both_ranks_apply_their_shards_of_all_buckets(sync, flattened):
    fields = {"load_format": "flattened_bucket"} if flattened else {}
    result = sync.prepare(multi_bucket(A, B, **fields))
    assert result.success, result.message
    assert ranks_of(result) == [(0, True), (1, True)]
    assert states(sync.stage) == ["receiving", "receiving"]
    sync.send(A, B, flattened=flattened)
    result = sync.complete(weight_version="v1")
    assert result.success, result.message
    versions = [entry["data"]["weight_version"] for entry in result.data["rank_results"]]
    assert versions == ["v1", "v1"]
    assert_checksums(sync.stage, weights_of(0) | expected_values(A, B))
    assert states(sync.stage) == ["grouped", "grouped"]


def test_both_ranks_compute_requests_while_a_completion_waits(sync):
    before = sync.stage.generate()["text"]
    assert sync.prepare(single_bucket(B)).success
    completing = sync.stage.send("complete_weights_update", {"group_name": "g"})
    assert sync.stage.generate()["text"] == before
    assert_checksums(sync.stage, weights_of(0))
    zeros = 4 * B[0][2][0] * B[0][2][1]
    sync.trainer.tell("send_zeros", group="g", nbytes=zeros)
    result = sync.stage.admin_result(completing)
    assert result.success, result.message
    assert sync.stage.generate()["text"] != before


def test_a_transfer_that_one_rank_cannot_arm_is_armed_at_none(sync, monkeypatch):
    # These need more memory than other tests have left in the kept buffers.
    everything = bucket_of(SHAPES)
    # In rank 0 only: rank 1 is another process.
    monkeypatch.setattr(memory, "MEMINFO", Meminfo(1))
    result = sync.prepare(multi_bucket(everything))
    assert not result.success
    assert "but only 1024 bytes" in result.message
    assert ranks_of(result) == [(0, False), (1, False)]
    monkeypatch.undo()
    assert states(sync.stage) == ["failed", "failed"]
    assert "but only 1024 bytes" in sync.complete().message
    assert sync.stage.admin("destroy_weights_update_group", group_name="g").success
    sync.trainer.tell("destroy", group="g")
    sync.join()
    sync.prepare(multi_bucket(A))
    sync.send(A)
    assert sync.complete().success
    assert_checksums(sync.stage, weights_of(0) | expected_values(A))


def test_a_killed_trainer_leaves_both_ranks_unchanged(sync, pool):
    assert sync.prepare(multi_bucket(A)).success
    sync.trainer.kill()
    result = sync.complete()
    assert not result.success
    assert "the weights of version" in result.message
    assert states(sync.stage) == ["failed", "failed"]
    assert_checksums(sync.stage, weights_of(0))
    next_sync = Syncing(sync.stage, pool.trainer(), ranks=2)
    next_sync.join()
    next_sync.prepare(single_bucket(B))
    next_sync.send(B)
    assert next_sync.complete().success
    assert_checksums(sync.stage, weights_of(0) | expected_values(B))
    next_sync.trainer.tell("destroy", group="g")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_join_does_not_block_the_others(pair, rank):
    """The others would otherwise wait for the deadline: the port of the store never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as connections:
        silent.settimeout(60)
        rendezvous = Syncing(pair, None, ranks=2).rendezvous(silent.getsockname()[1])
        joining = pair.send("init_weights_update_group", rendezvous)
        for _ in range(2):  # each rank has connected, and waits for a reply
            connections.enter_context(silent.accept()[0])
        for receiver in receivers()[rank]:
            os.kill(receiver, signal.SIGKILL)
        result = pair.admin_result(joining)
    assert not result.success
    assert "ended by SIGKILL" in result.message
    other = result.data["rank_results"][1 - rank]["message"]
    assert f"rank {rank}: " in other or other == result.message
    assert states(pair) == ["idle", "idle"]


def receivers():
    """The pids of the receiver processes of rank 0, which is this process, and of rank 1."""
    of_rank_0, of_rank_1 = [], []
    mark = f"{RANKS}={os.getpid()}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        status = read(process / "stat").rpartition(b")")[2].split()
        if not status or b"receiver-process" not in read(process / "cmdline").split(b"\0"):
            continue
        if int(status[1]) == os.getpid():  # it may have been started before RANKS was set
            of_rank_0.append(int(process.name))
        elif mark in read(process / "environ").split(b"\0"):
            of_rank_1.append(int(process.name))
    return of_rank_0, of_rank_1


def read(path):
    """The content of the file, or nothing if its process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return path.read_bytes()
    return b""


def test_all_ranks_report_a_killed_receiver_at_once(sync, pool):
    assert sync.prepare(multi_bucket(A)).success
    completing = sync.stage.send("complete_weights_update", {"group_name": "g"})
    for receiver in receivers()[1]:
        os.kill(receiver, signal.SIGKILL)
    result = sync.stage.admin_result(completing)
    assert not result.success
    assert "rank 1: group 'g': after 0 of 1 buckets" in result.message
    assert states(sync.stage) == ["failed", "failed"]
    assert_checksums(sync.stage, weights_of(0))
    sync.trainer.kill()
