"""Messages between the transfer thread and the stage's thread. Values only, no logic.

Invariant: each order is answered exactly once, or never if it was withdrawn first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from omni_proxy.replica.kv_transfer.request_fields import Fetch
    from omni_proxy.replica.kv_transfer.wire import Identity
    from omni_proxy.replica.models.kv import SequenceKV


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """A prefill request whose KV decode fetches by `key`.

    With `waits`, it is computed only after decode has connected.
    """

    key: str
    request_id: str
    prompt: str
    waits: bool


@dataclass(frozen=True, slots=True, eq=False)
class FetchOrder:
    """Decode: fetch the KV of a prompt into `kv`, which is empty.

    `prompt` is the digest of the prompt's `tokens` tokens; `vocabulary` is the number of logits.
    """

    fetch: Fetch
    prompt: str
    tokens: int
    identity: Identity
    kv: SequenceKV
    vocabulary: int


@dataclass(frozen=True, slots=True, eq=False)
class LegMatched:
    """Decode has connected for this leg."""

    leg: Leg


@dataclass(frozen=True, slots=True, eq=False)
class LegDone:
    """Decode has received the KV of this leg."""

    leg: Leg


@dataclass(frozen=True, slots=True, eq=False)
class LegFailed:
    """Decode will not receive the KV of this leg."""

    leg: Leg
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """The order's KV is complete.

    `logits` are those after its last token, `cached_tokens` is prefill's count. The KV's bytes are
    taken from the budget until they are given back.
    """

    order: FetchOrder
    logits: Tensor
    cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class FetchFailed:
    order: FetchOrder
    reason: str


@dataclass(frozen=True, slots=True)
class ThreadEnded:
    """The transfer thread has ended unexpectedly; no more KVs are transferred."""

    reason: str


TransferEvent: TypeAlias = LegMatched | LegDone | LegFailed | Fetched | FetchFailed | ThreadEnded
Post: TypeAlias = Callable[[TransferEvent], None]
