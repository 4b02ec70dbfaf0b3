import os
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from omni_proxy.process_group.broadcast import mapped_file
from tests.replica.tp.conftest import RANKS
from tests.replica.tp.test_operations import checked, serialized
from tests.replica.weights.stage_fixture import weights_of
from tests.replica.weights.sync_steps import (
    DOWN,
    NORM,
    SHAPES,
    UP,
    Meminfo,
    Syncing,
    many,
    one,
    sent_of,
    values,
)

A, B = sent_of([UP, NORM]), sent_of([DOWN], seed=7)


@pytest.fixture
def sync(pair, pool):
    """Two ranks, with the first weights again, in a group of three."""
    sync = Syncing(pair, pool.trainer(), ranks=2)
    sync.join()
    yield sync
    pair.admin("destroy_weights_update_group", group_name="g")
    if sync.trainer.living():
        sync.trainer.tell("destroy", group="g")
    assert serialized(pair, weights_of(0)).success
    pair.admin("continue_generation")


def ranks_of(answer):
    return [(each["rank"], each["success"]) for each in answer.data["rank_results"]]


def states(stage):
    return [each["data"]["weight_sync"]["state"] for each in stage.facts()["rank_results"]]


@pytest.mark.parametrize("flattened", [False, True])
def test_both_ranks_take_their_part_of_all_buckets(sync, flattened):
    more = {"load_format": "flattened_bucket"} if flattened else {}
    answer = sync.prepare(many(A, B, **more))
    assert answer.success, answer.message
    assert ranks_of(answer) == [(0, True), (1, True)]
    assert states(sync.stage) == ["receiving", "receiving"]
    sync.send(A, B, flattened=flattened)
    answer = sync.complete(weight_version="v1")
    assert answer.success, answer.message
    versions = [each["data"]["weight_version"] for each in answer.data["rank_results"]]
    assert versions == ["v1", "v1"]
    checked(sync.stage, weights_of(0) | values(A, B))
    assert states(sync.stage) == ["grouped", "grouped"]


def test_answers_are_computed_by_both_ranks_while_a_completion_waits(sync):
    before = sync.stage.generate()["text"]
    assert sync.prepare(one(B)).success
    completing = sync.stage.send("complete_weights_update", {"group_name": "g"})
    assert sync.stage.generate()["text"] == before
    checked(sync.stage, weights_of(0))
    zeros = 4 * B[0][2][0] * B[0][2][1]
    sync.trainer.tell("big", group="g", nbytes=zeros)
    answer = sync.stage.answer(completing)
    assert answer.success, answer.message
    assert sync.stage.generate()["text"] != before


def test_what_only_one_rank_can_arm_is_armed_at_none(sync, monkeypatch):
    everything = sent_of(SHAPES)  # more than any other test has left in kept memory
    monkeypatch.setattr(mapped_file, "MEMINFO", Meminfo(1))  # of rank 0: rank 1 is another process
    answer = sync.prepare(many(everything))
    assert not answer.success
    assert "but only 1024 bytes" in answer.message
    assert ranks_of(answer) == [(0, False), (1, False)]
    monkeypatch.undo()
    assert states(sync.stage) == ["failed", "failed"]
    assert "but only 1024 bytes" in sync.complete().message
    assert sync.stage.admin("destroy_weights_update_group", group_name="g").success
    sync.trainer.tell("destroy", group="g")
    sync.join()
    sync.prepare(many(A))
    sync.send(A)
    assert sync.complete().success
    checked(sync.stage, weights_of(0) | values(A))


def test_a_killed_trainer_leaves_both_ranks_unchanged(sync, pool):
    assert sync.prepare(many(A)).success
    sync.trainer.kill()
    answer = sync.complete()
    assert not answer.success
    assert "the weights of version" in answer.message
    assert states(sync.stage) == ["failed", "failed"]
    checked(sync.stage, weights_of(0))
    again = Syncing(sync.stage, pool.trainer(), ranks=2)
    again.join()
    again.prepare(one(B))
    again.send(B)
    assert again.complete().success
    checked(sync.stage, weights_of(0) | values(B))
    again.trainer.tell("destroy", group="g")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_join_does_not_block_the_others(pair, rank):
    """The deadline of the rendezvous is far away: its port is open, but nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as connections:
        silent.settimeout(60)
        rendezvous = Syncing(pair, None, ranks=2).rendezvous(silent.getsockname()[1])
        joining = pair.send("init_weights_update_group", rendezvous)
        for _ in range(2):  # each rank has one connection, and waits
            connections.enter_context(silent.accept()[0])
        for receiver in receivers()[rank]:
            os.kill(receiver, signal.SIGKILL)
        answer = pair.answer(joining)
    assert not answer.success
    assert "ended by SIGKILL" in answer.message
    other = answer.data["rank_results"][1 - rank]["message"]
    assert f"rank {rank}: " in other or other == answer.message
    assert states(pair) == ["idle", "idle"]


def receivers():
    """The programs that receive for rank 0, which is this process, and for rank 1."""
    ours, theirs = [], []
    mark = f"{RANKS}={os.getpid()}".encode()
    for each in Path("/proc").glob("[0-9]*"):
        if b"receiver-process" in read(each / "cmdline").split(b"\0") and mark in read(
            each / "environ"
        ).split(b"\0"):
            parent = int(read(each / "stat").rpartition(b")")[2].split()[1])
            (ours if parent == os.getpid() else theirs).append(int(each.name))
    return ours, theirs


def read(path):
    """Nothing of a process that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return path.read_bytes()
    return b""


def test_a_receiver_that_is_killed_is_reported_by_all_ranks_at_once(sync, pool):
    assert sync.prepare(many(A)).success
    completing = sync.stage.send("complete_weights_update", {"group_name": "g"})
    for receiver in receivers()[1]:
        os.kill(receiver, signal.SIGKILL)
    answer = sync.stage.answer(completing)
    assert not answer.success
    assert "rank 1: group 'g': after 0 of 1 buckets" in answer.message
    assert states(sync.stage) == ["failed", "failed"]
    checked(sync.stage, weights_of(0))
    sync.trainer.kill()
