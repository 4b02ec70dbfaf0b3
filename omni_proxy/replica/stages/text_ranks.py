"""Builds the text stage over several ranks: the leader with its followers' processes; a follower.

Invariant: if the leader does not start, no follower process is left.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from omni_proxy.replica.models.shard import Shard
from omni_proxy.replica.models.text_model import TextModel
from omni_proxy.replica.stages.text_settings import (
    TextSettings,
    batch_limits_and_cache,
    load_model,
    with_weight_operations,
)
from omni_proxy.replica.tp.follower import FollowerScheduler
from omni_proxy.replica.tp.group import RankGroup, open_store
from omni_proxy.replica.tp.leader import Followers, LeaderLlama, LeaderScheduler, LeaderWorker
from omni_proxy.replica.tp.sharded_model import RankWorker, ShardedLlama

FOLLOWER = "omni_proxy.replica.stages.text_ranks:build_follower"


def start_leader(stage_name: str, text: TextModel, settings: TextSettings) -> LeaderScheduler:
    """Start the followers and return the scheduler over all ranks.

    Raises ValueError if the model cannot be split that way, RankLost if a follower did not start.
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
        group.join(store)
        worker = LeaderWorker(dataclasses.replace(text, model=model), group, followers)
        scheduler = LeaderScheduler(stage_name, worker, *batch_limits_and_cache(settings))
        return with_weight_operations(scheduler, settings)
    except BaseException:
        followers.close()
        raise


def build_follower(
    stage_name: str, *, rank: int, port: int, settings: dict[str, Any]
) -> FollowerScheduler:
    """Load rank `rank`'s part of the model; the ranks connect to the leader's `port`."""
    own = TextSettings(**settings)
    text = load_model(own)
    group = RankGroup(rank, own.tp)
    model = ShardedLlama(text.model, Shard(text.model.config, rank, own.tp), group.add_up)
    worker = RankWorker(dataclasses.replace(text, model=model), group)
    scheduler = FollowerScheduler(stage_name, worker, *batch_limits_and_cache(own))
    scheduler.port = port
    return with_weight_operations(scheduler, own)
