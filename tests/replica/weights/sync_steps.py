"""Steps of a weight sync between a trainer and a stage, and the weights that it should leave."""

from __future__ import annotations

import time

import torch

from omni_proxy.replica.pipeline.stage_messages import AdminResult
from tests.process_group.trainer_process import make_tensor
from tests.replica.weights.stage_fixture import weights_of

NORM = "model.norm.weight"
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
BODY = {"group_name": "g"}
SHAPES = {name: list(tensor.shape) for name, tensor in weights_of(0).items()}


def bucket_of(names, seed=1, dtype="float32"):
    """A bucket of the named tensors: (name, dtype, shape, seed) of each."""
    return [(name, dtype, SHAPES[name], seed + index) for index, name in enumerate(names)]


def announced(bucket):
    return {
        "names": [name for name, *_ in bucket],
        "dtypes": [dtype for _, dtype, *_ in bucket],
        "shapes": [shape for *_, shape, _ in bucket],
    }


def multi_bucket(*buckets, **fields):
    """The body of a call that announces all buckets at once."""
    announcements = [announced(bucket) for bucket in buckets]
    return {"num_buckets": len(buckets), "buckets": announcements} | BODY | fields


def single_bucket(bucket, **fields):
    """The body of a call that announces one bucket, with its names at the top level."""
    return announced(bucket) | BODY | {"transport": "nccl_broadcast"} | fields


def expected_values(*buckets):
    """The values that these buckets give to the tensors of the model."""
    return {
        name: make_tensor(dtype, shape, seed).to(torch.float32)
        for bucket in buckets
        for name, dtype, shape, seed in bucket
    }


class Meminfo:
    """Replaces /proc/meminfo, to set the available memory."""

    def __init__(self, kib):
        self.kib = kib

    def read_text(self):
        return f"MemAvailable: {self.kib} kB\n"


class Syncing:
    """A sync between one stage and one trainer, in a group of the trainer."""

    def __init__(self, stage, trainer, group="g", ranks=1):
        self.stage, self.trainer, self.group, self.ranks = stage, trainer, group, ranks

    def join(self, **fields) -> AdminResult:
        opened = self.trainer.tell("open", group=self.group, world=1 + self.ranks)
        assert "port" in opened, opened
        port = opened["port"]
        result = self.stage.admin("init_weights_update_group", self.rendezvous(port) | fields)
        assert self.trainer.reply() == {"joined": True}
        assert result.success, result.message
        return result

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

    def order_send(self, bucket, **options):
        tensors = [(dtype, shape, seed) for _, dtype, shape, seed in bucket]
        self.trainer.order("send", group=self.group, tensors=tensors, **options)

    def send(self, *buckets, **options):
        for bucket in buckets:
            self.order_send(bucket, **options)
        for _ in buckets:
            assert "sent" in self.trainer.reply()

    def complete(self, **fields) -> AdminResult:
        return self.stage.admin("complete_weights_update", {"group_name": self.group} | fields)

    def leave(self) -> AdminResult:
        result = self.stage.admin("destroy_weights_update_group", group_name=self.group)
        assert self.trainer.tell("destroy", group=self.group) == {"destroyed": True}
        return result

    def state(self) -> str:
        return self.facts()["state"]

    def facts(self) -> dict:
        return self.stage.facts()["weight_sync"]

    def until(self, state) -> dict:
        """Polls until the sync has the state: no message reports that a trainer has ended."""
        while (facts := self.facts())["state"] != state:
            assert facts["state"] in ("receiving", "received", "arming", "grouped"), facts
            time.sleep(0.01)  # noqa: TID251  the stage runs in its own thread
        return facts
