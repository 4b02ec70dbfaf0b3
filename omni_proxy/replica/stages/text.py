"""The text stage's factory: its parameters, and the scheduler over a model in one or several ranks.

Invariant: a `TextSettings` holds values in range; parameters are checked before a model is loaded.
If the leader of several ranks does not start, no follower process is left. Tensor parallelism and
ZeroMQ are imported only if they are configured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

import torch

from omni_proxy.replica.kv_events.publisher_settings import KvEventSettings, parse_kv_event_settings
from omni_proxy.replica.kv_transfer.transfer_settings import (
    TransferSettings,
    parse_transfer_settings,
)
from omni_proxy.replica.kv_transfer.transfer_thread import TransferThread
from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.shard import Shard
from omni_proxy.replica.models.text_model import ModelWorker, TextModel, load_text_model
from omni_proxy.replica.text.batch_queue import BatchLimits
from omni_proxy.replica.text.prefix_cache import PrefixCache
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.text.transfer_scheduler import TransferScheduler
from omni_proxy.replica.weights.trainer_groups import (
    DEFAULT_RECEIVE_SETTINGS,
    MAX_DEADLINE_SECS,
    Isolation,
    ReceiveSettings,
)
from omni_proxy.replica.weights.weight_actions import ModelRank, WeightActions

if TYPE_CHECKING:
    from omni_proxy.replica.tp.follower import FollowerScheduler
    from omni_proxy.replica.tp.leader import LeaderScheduler

FOLLOWER: Final = "omni_proxy.replica.stages.text:build_follower"
SchedulerKind = TypeVar("SchedulerKind", bound=TextScheduler)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Parameters of a text stage.

    `model` is a name or the path of a GGUF file. `max_total_tokens` bounds the tokens of all
    running requests together, and so the length of one; `prefill_chunk` bounds the prompt tokens in
    one batch, in addition to decoding requests. `prefix_cache_entries` 0 turns the cache off.
    `threads` 0 keeps torch's default. `tp` is the number of processes that share the model; 1
    turns this off. Weights are read from disk only below `weights_root`; "" allows none.
    `weights_isolation` and the `weights_*_secs` configure updates over a trainer's group
    (`ReceiveSettings`). `kv_transfer` makes it a prefill or decode replica (`TransferSettings`),
    `kv_events` publishes the contents of the prefix cache (`KvEventSettings`).
    """

    model: str = "tiny"
    seed: int = 0
    threads: int = 0
    max_running: int = 16
    max_total_tokens: int = 16_384
    prefill_chunk: int = 256
    prefix_cache_entries: int = 16
    prefix_cache_bytes: int = 256 * 2**20
    prefix_min_tokens: int = 16
    weights_root: str = "/"
    weights_isolation: Isolation = DEFAULT_RECEIVE_SETTINGS.isolation
    weights_join_secs: float = DEFAULT_RECEIVE_SETTINGS.join_secs
    weights_ready_secs: float = DEFAULT_RECEIVE_SETTINGS.ready_secs
    weights_receive_secs: float = DEFAULT_RECEIVE_SETTINGS.receive_secs
    weights_stall_secs: float = DEFAULT_RECEIVE_SETTINGS.stall_secs
    tp: int = 1
    kv_transfer: Mapping[str, Any] = field(default_factory=dict)
    kv_events: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_running", "max_total_tokens", "prefill_chunk", "prefix_min_tokens", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("threads", "prefix_cache_entries", "prefix_cache_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        for name in ("join", "ready", "receive", "stall"):
            secs = getattr(self, f"weights_{name}_secs")
            if not 0 < secs <= MAX_DEADLINE_SECS:
                raise ValueError(f"weights_{name}_secs must be within 0 and {MAX_DEADLINE_SECS:g}")
        if self.weights_isolation not in get_args(Isolation):
            raise ValueError(
                f"weights_isolation is {' or '.join(get_args(Isolation))}, not "
                f"{self.weights_isolation!r}"
            )
        if self.transfer.role != "null" and self.tp > 1:
            raise ValueError(f"a {self.transfer.role} replica has one rank: leave tp out")
        if self.events.enabled and self.events.block_size < self.prefix_min_tokens:
            raise ValueError(
                f"kv_events: a block of {self.events.block_size} tokens is too short to be reused: "
                f"prefix_min_tokens is {self.prefix_min_tokens}"
            )

    @property
    def transfer(self) -> TransferSettings:
        return parse_transfer_settings(self.kv_transfer)

    @property
    def events(self) -> KvEventSettings:
        return parse_kv_event_settings(self.kv_events)

    @property
    def terms(self) -> ReceiveSettings:
        return ReceiveSettings(
            isolation=self.weights_isolation,
            join_secs=self.weights_join_secs,
            ready_secs=self.weights_ready_secs,
            receive_secs=self.weights_receive_secs,
            stall_secs=self.weights_stall_secs,
        )


def parse_settings(stage_name: str, params: Mapping[str, Any]) -> TextSettings:
    """Raises ValueError for parameters that are unknown or out of range."""
    names = [field.name for field in fields(TextSettings)]
    unknown = sorted(params.keys() - set(names))
    if unknown:
        raise ValueError(
            f"stage {stage_name} has no parameter {unknown[0]!r}; a text stage has "
            + ", ".join(names)
        )
    return TextSettings(**params)


def build(stage_name: str, **params: Any) -> TextScheduler:
    """Load the model and return its scheduler; `params` are those of TextSettings.

    Raises ValueError for parameters that are unknown or out of range, and what loading raises.
    """
    settings = parse_settings(stage_name, params)
    if not settings.events.enabled:
        return _scheduler(stage_name, settings)
    # Import ZeroMQ only if KV events are configured.
    from omni_proxy.replica.kv_events.publisher import KvEventPublisher, PublishedChanges

    with ExitStack() as on_error:
        # Before the model is loaded, so that a port in use is reported immediately.
        publisher = KvEventPublisher(settings.events)
        on_error.callback(publisher.close)
        scheduler = _scheduler(stage_name, settings)
        on_error.pop_all()
    scheduler.cache.listener = PublishedChanges(publisher)
    scheduler.info |= publisher.information
    scheduler.at_end.append(publisher.close)
    return scheduler


def _scheduler(stage_name: str, settings: TextSettings) -> TextScheduler:
    text = _load_model(settings)
    if settings.tp > 1:
        return _start_leader(stage_name, text, settings)
    worker, parts = ModelWorker(text), _batch_limits_and_cache(settings)
    scheduler: TextScheduler
    if settings.transfer.role != "null":
        transfers = TransferThread(settings.transfer, f"{stage_name}-kv")
        scheduler = TransferScheduler(stage_name, transfers, worker, *parts)
    else:
        scheduler = TextScheduler(stage_name, worker, *parts)
    return _with_weight_operations(scheduler, settings)


def _start_leader(stage_name: str, text: TextModel, settings: TextSettings) -> LeaderScheduler:
    """Start the followers and return the scheduler over all ranks.

    Raises ValueError if the model cannot be split that way, RankLost if a follower did not start.
    No follower process is left in that case.
    """
    # Import tensor parallelism only if it is configured.
    from omni_proxy.replica.tp.group import RankGroup, open_store
    from omni_proxy.replica.tp.leader import Followers, LeaderLlama, LeaderScheduler, LeaderWorker

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
        scheduler = LeaderScheduler(stage_name, worker, *_batch_limits_and_cache(settings))
        return _with_weight_operations(scheduler, settings)
    except BaseException:
        followers.close()
        raise


def build_follower(
    stage_name: str, *, rank: int, port: int, settings: dict[str, Any]
) -> FollowerScheduler:
    """Load rank `rank`'s part of the model; the ranks connect to the leader's `port`."""
    from omni_proxy.replica.tp.follower import FollowerScheduler
    from omni_proxy.replica.tp.group import RankGroup
    from omni_proxy.replica.tp.sharded_model import RankWorker, ShardedLlama

    own = TextSettings(**settings)
    text = _load_model(own)
    group = RankGroup(rank, own.tp)
    model = ShardedLlama(text.model, Shard(text.model.config, rank, own.tp), group.add_up)
    worker = RankWorker(dataclasses.replace(text, model=model), group)
    scheduler = FollowerScheduler(stage_name, worker, *_batch_limits_and_cache(own))
    scheduler.port = port
    return _with_weight_operations(scheduler, own)


def _load_model(settings: TextSettings) -> TextModel:
    """Load the complete model, after setting the number of threads of this process."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return load_text_model(settings.model, seed=settings.seed)


def _batch_limits_and_cache(settings: TextSettings) -> tuple[BatchLimits, PrefixCache[SequenceKV]]:
    return (
        BatchLimits(settings.max_running, settings.max_total_tokens, settings.prefill_chunk),
        PrefixCache(
            settings.prefix_cache_entries, settings.prefix_cache_bytes, settings.prefix_min_tokens
        ),
    )


def _with_weight_operations(scheduler: SchedulerKind, settings: TextSettings) -> SchedulerKind:
    """Register the weight operations with the scheduler and return it."""
    worker = scheduler.worker
    WeightActions(
        scheduler,
        load_first=lambda: load_text_model(settings.model, seed=settings.seed).model,
        weights_root=settings.weights_root,
        rank=ModelRank(worker.tp_rank, worker.tp_size),
        terms=settings.terms,
    )
    return scheduler
