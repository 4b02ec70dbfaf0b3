"""The messages between the main process and the subscriber process, both of one build.

Carried as those of data-plane processes (`multiprocess.ipc`). Invariant: changes carry the
generation of their subscription, so that those from before a flush are known.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from omni_proxy.routing.kv_events.held_changes import PackedChanges


class SubscribeCommand(Struct, frozen=True, tag=True):
    """Follow the publisher at `endpoint` under this number. `binds`: it connects to us; where we
    can't be reached there, because the address is not ours, it is dialled after all. `replay`:
    endpoint of its replay socket, or ""."""

    number: int
    endpoint: str
    binds: bool
    replay: str


class UnsubscribeCommand(Struct, frozen=True, tag=True):
    number: int


class FlushedCommand(Struct, frozen=True, tag=True):
    """The engine's cache is empty; what follows has this generation."""

    number: int
    generation: int


class LimitCommand(Struct, frozen=True, tag=True):
    """At most so many blocks, over all subscriptions."""

    blocks: int


class RepeatCommand(Struct, frozen=True, tag=True):
    """Say everything that is believed once more: somebody has to learn it."""


SubscriberCommand: TypeAlias = (
    SubscribeCommand | UnsubscribeCommand | FlushedCommand | LimitCommand | RepeatCommand
)


class ChangesEvent(Struct, frozen=True, tag=True):
    number: int
    generation: int
    changes: PackedChanges


class PublisherReport(Struct, frozen=True, tag=True):
    """The mode of a subscription and why; counts only rise."""

    number: int
    mode: str
    reason: str
    batches: int
    undecodable: int
    undecodable_reason: str


SubscriberEvent: TypeAlias = ChangesEvent | PublisherReport
