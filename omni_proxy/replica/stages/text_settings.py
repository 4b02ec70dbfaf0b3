"""Parameters of the text stage, checked before a model is loaded, and the objects built from them.

Invariant: a `TextSettings` holds values in range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args

import torch

from omni_proxy.replica.kv_events.publisher_settings import KvEventSettings, parse_kv_event_settings
from omni_proxy.replica.kv_transfer.transfer_settings import (
    TransferSettings,
    parse_transfer_settings,
)
from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.text_model import TextModel, load_text_model
from omni_proxy.replica.text.batch_queue import BatchLimits
from omni_proxy.replica.text.prefix_cache import PrefixCache
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.weights.trainer_groups import (
    DEFAULT_RECEIVE_SETTINGS,
    MAX_DEADLINE_SECS,
    Isolation,
    ReceiveSettings,
)
from omni_proxy.replica.weights.weight_actions import ModelRank, WeightActions

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


def load_model(settings: TextSettings) -> TextModel:
    """Load the complete model, after setting the number of threads of this process."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return load_text_model(settings.model, seed=settings.seed)


def batch_limits_and_cache(settings: TextSettings) -> tuple[BatchLimits, PrefixCache[SequenceKV]]:
    return (
        BatchLimits(settings.max_running, settings.max_total_tokens, settings.prefill_chunk),
        PrefixCache(
            settings.prefix_cache_entries, settings.prefix_cache_bytes, settings.prefix_min_tokens
        ),
    )


def with_weight_operations(scheduler: SchedulerKind, settings: TextSettings) -> SchedulerKind:
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
