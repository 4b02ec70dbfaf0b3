"""The text stage's factory: loads a model and returns the scheduler over it.

Invariant: parameters are checked before a model is loaded.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from omni_proxy.replica.kv_transfer.transfer_thread import TransferThread
from omni_proxy.replica.models.text_model import ModelWorker
from omni_proxy.replica.stages.text_settings import (
    TextSettings,
    batch_limits_and_cache,
    load_model,
    parse_settings,
    with_weight_operations,
)
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.text.transfer_scheduler import TransferScheduler


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
    text = load_model(settings)
    if settings.tp > 1:
        # Import tensor parallelism only if it is configured.
        from omni_proxy.replica.stages.text_ranks import start_leader

        return start_leader(stage_name, text, settings)
    worker, parts = ModelWorker(text), batch_limits_and_cache(settings)
    scheduler: TextScheduler
    if settings.transfer.role != "null":
        transfers = TransferThread(settings.transfer, f"{stage_name}-kv")
        scheduler = TransferScheduler(stage_name, transfers, worker, *parts)
    else:
        scheduler = TextScheduler(stage_name, worker, *parts)
    return with_weight_operations(scheduler, settings)
