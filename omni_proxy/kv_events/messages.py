"""The messages between the main process and the subscriber process, which are of the same build.

They are framed like those of data-plane processes (`multiprocess.ipc.channel`). Invariant: changes
have the generation of their subscription, so that those from before a flush can be dropped.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from omni_proxy.routing.kv_events.engine_blocks import PackedChanges


class SubscribeCommand(Struct, frozen=True, tag=True):
    """Follow the publisher at `endpoint` under this number.

    `binds`: bind `endpoint` for the publisher; if the address is not of this machine, connect
    instead. `replay`: endpoint of its replay socket, or "".
    """

    number: int
    endpoint: str
    binds: bool
    replay: str


class UnsubscribeCommand(Struct, frozen=True, tag=True):
    number: int


class FlushedCommand(Struct, frozen=True, tag=True):
    """The engine's cache is empty; later changes get this generation."""

    number: int
    generation: int


class LimitCommand(Struct, frozen=True, tag=True):
    """The maximum number of blocks over all subscriptions."""

    blocks: int


class RepeatCommand(Struct, frozen=True, tag=True):
    """Send all known blocks again, for a new process."""


SubscriberCommand: TypeAlias = (
    SubscribeCommand | UnsubscribeCommand | FlushedCommand | LimitCommand | RepeatCommand
)


class ChangesEvent(Struct, frozen=True, tag=True):
    number: int
    generation: int
    changes: PackedChanges


class PublisherReport(Struct, frozen=True, tag=True):
    """The mode of a subscription and its reason; counts never decrease."""

    number: int
    mode: str
    reason: str
    batches: int
    undecodable: int
    undecodable_reason: str


SubscriberEvent: TypeAlias = ChangesEvent | PublisherReport
