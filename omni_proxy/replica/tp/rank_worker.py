"""The worker of one rank: its part of the model, and the group of all ranks."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from omni_proxy.replica.models.text_model import TextModel
from omni_proxy.replica.text.model_worker import ModelWorker
from omni_proxy.replica.tp.group import RankGroup
from omni_proxy.replica.tp.sharded_model import ShardedLlama


class RankWorker(ModelWorker):
    """`text.model` is a ShardedLlama."""

    def __init__(self, text: TextModel, group: RankGroup) -> None:
        super().__init__(text)
        self.group = group
        self.tp_rank, self.tp_size = group.rank, group.size

    @property
    def model(self) -> ShardedLlama:
        return cast("ShardedLlama", self.text.model)

    def whole(self, name: str, tensor: Tensor) -> Tensor | None:
        """As of any worker; raises RankLost."""
        shard = self.model.shard
        if shard.cut(name) is None:
            return tensor if self.tp_rank == 0 else None
        parts = self.group.gather(tensor)
        return shard.gather(name, parts) if parts else None
