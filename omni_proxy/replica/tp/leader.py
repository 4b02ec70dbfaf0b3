"""Rank 0: the text stage's scheduler over a model whose other parts are its followers'.

Invariant: a batch that the followers were told of is finished, or the stage ends: then every rank
goes, its requests fail, and the stage's supervision starts all of it again, with the weights it
once began with. An operation is over when every rank has answered; while it halts one of them,
nothing is computed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, cast

from torch import Tensor

from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.llama import Batch, BatchPart, Llama
from omni_proxy.replica.models.text_model import TextModel
from omni_proxy.replica.pipeline.messages import Admin, AdminResult, Emit, StageInput, StageOutput
from omni_proxy.replica.text.constraint import CompiledConstraint
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.text.slow_operations import StepDone
from omni_proxy.replica.text.stage_settings import (
    TextSettings,
    batch_limits_and_cache,
    with_weight_operations,
)
from omni_proxy.replica.tp.follower_processes import Followers
from omni_proxy.replica.tp.group import (
    RankGroup,
    RankLost,
    RankMessage,
    StepOverdue,
    open_store,
    step,
)
from omni_proxy.replica.tp.mirrored_kv import KVJournal, MirroredKV
from omni_proxy.replica.tp.rank_fanout import RankFanOut
from omni_proxy.replica.tp.shard import Shard
from omni_proxy.replica.tp.sharded_model import RankWorker, ShardedLlama

FOLLOWER = "omni_proxy.replica.tp.follower:build"

FromElsewhere = StepDone | CompiledConstraint | RankMessage | StepOverdue | RankLost


def start_leader(stage_name: str, text: TextModel, settings: TextSettings) -> LeaderScheduler:
    """Start the followers and return the scheduler over all ranks.

    Raises ValueError where the model cannot be split so, RankLost where a follower did not come up.
    """
    shard = Shard(text.model.config, 0, settings.tp)
    store, port = open_store(settings.tp)
    followers = Followers(stage_name)
    group = RankGroup(0, settings.tp, lambda: followers.lost)
    try:
        shared = {"port": port, "settings": dataclasses.asdict(settings)}
        followers.start(FOLLOWER, ({"rank": rank} | shared for rank in range(1, settings.tp)))
        model = LeaderLlama(text.model, shard, group, followers)
        followers.await_ready()
        group.meet(store)
        worker = LeaderWorker(dataclasses.replace(text, model=model), group, followers)
        scheduler = LeaderScheduler(stage_name, worker, *batch_limits_and_cache(settings))
        return with_weight_operations(scheduler, settings)
    except BaseException:
        followers.close()
        raise


class LeaderLlama(ShardedLlama):
    """Sends every batch to the followers before it computes its own part."""

    def __init__(self, whole: Llama, shard: Shard, group: RankGroup, followers: Followers) -> None:
        super().__init__(whole, shard, group.add_up)
        self._followers = followers
        self._journal = KVJournal()
        self._announced = False

    def new_kv(self) -> SequenceKV:
        return MirroredKV(self.kv_shape, self.model.embed_tokens.weight.data, self._journal)

    def forward(self, parts: Sequence[BatchPart], *, all_positions: bool = False) -> Tensor:
        with self._in_step():
            return super().forward(parts, all_positions=all_positions)

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        with self._in_step():
            return super().hidden(tokens)

    def _batch(self, parts: Sequence[BatchPart]) -> Batch:
        batch = super()._batch(parts)  # what it refuses, the followers never hear of
        forked = [(cast("MirroredKV", kv).number, list(tokens)) for tokens, kv in parts]
        self._announced = True
        self._followers.tell(step(self._journal.take(), forked))
        return batch

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        self._announced = False
        try:
            yield
        except RankLost:
            raise
        except Exception as error:  # whatever it was: half a step cannot be taken back
            if not self._announced:
                raise
            reason = f"it gave up in the middle of a step: {type(error).__name__}: {error}"
            raise self._followers.lose(0, reason) from error


class LeaderWorker(RankWorker):
    """Rank 0's worker, which owns the followers' processes."""

    def __init__(self, text: TextModel, group: RankGroup, followers: Followers) -> None:
        super().__init__(text, group)
        self.followers = followers

    @property
    def lost(self) -> str:
        """Why nothing can be computed any more, or ""."""
        return self.followers.lost or self.group.broken

    def close(self) -> None:
        """End the followers."""
        self.followers.close()
        self.group.close()


class LeaderScheduler(TextScheduler):
    """The stage's scheduler; `run` raises RankLost as soon as a rank is known to be lost."""

    worker: LeaderWorker

    def __init__(self, stage_name: str, worker: LeaderWorker, *bounds: Any) -> None:
        super().__init__(stage_name, worker, *bounds)
        self._fan_out = RankFanOut(self, worker.followers.ranks)
        self._way_out: Emit = self.emit
        self.info |= {"tp_size": worker.tp_size, "follower_pids": worker.followers.pids}

    def run(self, inbox: SimpleQueue[StageInput], emit: Emit) -> None:
        self._way_out = emit
        try:
            self.worker.followers.listen(cast("Callable[[FromElsewhere], None]", inbox.put))
            super().run(inbox, self._catch)
        finally:
            self.worker.close()

    def _catch(self, message: StageOutput) -> None:
        """Emits every message except rank 0's answers, which are merged into the stage's."""
        if isinstance(message, AdminResult):
            self._fan_out.own_answer(message)
        else:
            self._way_out(message)

    @property
    def halted(self) -> bool:
        return super().halted or self._fan_out.halting

    def take(self, message: StageInput | FromElsewhere) -> None:
        match message:
            case Admin():
                self._fan_out.run(message, lambda: super(LeaderScheduler, self).take(message))
            case StepDone():
                self._fan_out.own_step(message)
            case RankMessage(rank, reported):
                self._fan_out.heard(rank, reported)
            case StepOverdue():
                self._fan_out.overdue(message)
            case RankLost():
                raise message
            case _:
                super().take(message)
        self._require_all()

    def step(self) -> None:
        super().step()
        self._require_all()

    def _require_all(self) -> None:
        if self.worker.lost:
            raise RankLost(self.worker.lost)

    # What the fan-out asks

    def tell(self, message: Admin) -> None:
        self.worker.followers.tell(message)

    def remind(self, message: StepOverdue, after_secs: float) -> Callable[[], None]:
        reminder = threading.Timer(after_secs, self._post, (message,))
        reminder.daemon = True
        reminder.start()
        return reminder.cancel

    def advance(self, done: StepDone) -> None:
        super().take(done)

    def damaged(self) -> None:
        self.weights_damaged()

    def answer(self, result: AdminResult) -> None:
        self._way_out(result)
