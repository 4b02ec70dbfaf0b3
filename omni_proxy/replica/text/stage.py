"""The text stage's factory: a model, its bounds, and the scheduler over them.

Invariant: whatever the parameters ask for is checked before a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from omni_proxy.replica.models.text_model import load_text_model
from omni_proxy.replica.text.prefix_cache import PrefixCache
from omni_proxy.replica.text.roster import Limits
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.text.worker import ModelWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """A text stage's parameters.

    `model` is a name or the path of a GGUF file. `max_total_tokens` bounds the tokens of all
    running requests together, and so the length of one; `prefill_chunk` is how many tokens of
    prompts one batch may hold beside the running answers. 0 `prefix_cache_entries` turn it off.
    `threads` 0 leaves torch as it is.
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

    def __post_init__(self) -> None:
        for name in ("max_running", "max_total_tokens", "prefill_chunk", "prefix_min_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("threads", "prefix_cache_entries", "prefix_cache_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")


def build(stage_name: str, **params: Any) -> TextScheduler:
    """Load the model and return its scheduler; `params` are those of TextSettings.

    Raises ValueError for parameters that are unknown or out of range, and what loading raises.
    """
    known = [each.name for each in fields(TextSettings)]
    unknown = sorted(params.keys() - set(known))
    if unknown:
        raise ValueError(
            f"stage {stage_name} has no parameter {unknown[0]!r}; a text stage has "
            + ", ".join(known)
        )
    settings = TextSettings(**params)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return TextScheduler(
        stage_name,
        ModelWorker(load_text_model(settings.model, seed=settings.seed)),
        Limits(settings.max_running, settings.max_total_tokens, settings.prefill_chunk),
        PrefixCache(
            settings.prefix_cache_entries, settings.prefix_cache_bytes, settings.prefix_min_tokens
        ),
    )
