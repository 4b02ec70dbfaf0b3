"""A trainer and a stage that sync: announced tensors, broadcasts, and the expected weights."""

from __future__ import annotations

import time

import torch

from omni_proxy.replica.pipeline.messages import AdminResult
from tests.process_group.trainer_process import make_tensor
from tests.replica.weights.stage_fixture import weights_of

NORM = "model.norm.weight"
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
BODY = {"group_name": "g"}
SHAPES = {name: list(each.shape) for name, each in weights_of(0).items()}


def sent_of(names, seed=1, dtype="float32"):
    """A bucket of any tensors: (name, dtype, shape, seed) of each."""
    return [(name, dtype, SHAPES[name], seed + place) for place, name in enumerate(names)]


def announced(bucket):
    return {
        "names": [name for name, *_ in bucket],
        "dtypes": [dtype for _, dtype, *_ in bucket],
        "shapes": [shape for *_, shape, _ in bucket],
    }


def many(*buckets, **more):
    """The form with all buckets at once."""
    listed = [announced(bucket) for bucket in buckets]
    return {"num_buckets": len(buckets), "buckets": listed} | BODY | more


def one(bucket, **more):
    """The form with one bucket's names at the top."""
    return announced(bucket) | BODY | {"transport": "nccl_broadcast"} | more


def values(*buckets):
    """The expected values of the model afterwards."""
    return {
        name: make_tensor(dtype, shape, seed).to(torch.float32)
        for bucket in buckets
        for name, dtype, shape, seed in bucket
    }


class Meminfo:
    """Sets the memory that the machine reports."""

    def __init__(self, kib):
        self.kib = kib

    def read_text(self):
        return f"MemAvailable: {self.kib} kB\n"


class Syncing:
    """One stage and one trainer's group."""

    def __init__(self, stage, trainer, group="g", ranks=1):
        self.stage, self.trainer, self.group, self.ranks = stage, trainer, group, ranks

    def join(self, **more) -> AdminResult:
        opened = self.trainer.tell("open", group=self.group, world=1 + self.ranks)
        assert "port" in opened, opened
        port = opened["port"]
        answer = self.stage.admin("init_weights_update_group", self.rendezvous(port) | more)
        assert self.trainer.reply() == {"joined": True}
        assert answer.success, answer.message
        return answer

    def rendezvous(self, port):
        return {
            "master_address": "127.0.0.1",
            "master_port": port,
            "world_size": 1 + self.ranks,
            "rank_offset": 1,
            "group_name": self.group,
            "backend": "gloo",
        }

    def prepare(self, body) -> AdminResult:
        return self.stage.admin("prepare_weights_update", body | {"group_name": self.group})

    def order_send(self, bucket, **how):
        tensors = [(dtype, shape, seed) for _, dtype, shape, seed in bucket]
        self.trainer.order("send", group=self.group, tensors=tensors, **how)

    def send(self, *buckets, **how):
        for bucket in buckets:
            self.order_send(bucket, **how)
        for _ in buckets:
            assert "sent" in self.trainer.reply()

    def complete(self, **more) -> AdminResult:
        return self.stage.admin("complete_weights_update", {"group_name": self.group} | more)

    def leave(self) -> AdminResult:
        answer = self.stage.admin("destroy_weights_update_group", group_name=self.group)
        assert self.trainer.tell("destroy", group=self.group) == {"destroyed": True}
        return answer

    def state(self) -> str:
        return self.reported()["state"]

    def reported(self) -> dict:
        return self.stage.facts()["weight_sync"]

    def until(self, state) -> dict:
        """Poll the stage: no message reports the end of a trainer."""
        while (reported := self.reported())["state"] != state:
            assert reported["state"] in ("receiving", "received", "arming", "grouped"), reported
            time.sleep(0.01)  # noqa: TID251  the stage has a loop of its own
        return reported
