"""Messages that the members of a cluster publish to each other: msgpack, on one channel. Pure.

Invariant: a message of an unknown kind, or one that can't be decoded, is dropped without any other
effect, because members of two releases may share a store. A worker is identified by an 8-byte hash
of its URL, because counts are sent up to twenty times a second.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Struct

from omni_proxy.cluster.proxy_figures import ProxyFigures
from omni_proxy.shared.decoding import decode_or_none

# A number that the store or a member increases by one. Higher ones are invalid: the store can't
# increase them, and every later one would be taken for an older one.
Ordinal = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
MAX_TARGETS: Final = 1 << 17  # workers and ranks: twice the number of cells in shared counters


class CountsMessage(Struct, frozen=True, array_like=True, tag="counts"):
    """In-flight counts of a member. `number`: increases by one with each message.

    `whole`: a snapshot, missing targets have none in flight; else a delta, they are unchanged.
    `total`: requests in flight at the member. `waits`: some of its requests wait for a worker.
    """

    member: str
    number: Ordinal
    whole: bool
    total: int
    waits: bool
    in_flight: dict[int, int]


class HelloMessage(Struct, frozen=True, array_like=True, tag="hello"):
    """A member has subscribed: the others publish all their counts."""

    member: str


class ByeMessage(Struct, frozen=True, array_like=True, tag="bye"):
    """A member ends: its counts are dropped."""

    member: str


class WeightsMessage(Struct, frozen=True, array_like=True, tag="weights"):
    """A state that the holder of the lease on weights has written into the store.

    Each member applies and acknowledges it. See `cluster_member.weight_state`.
    """

    member: str
    state: bytes


class AckMessage(Struct, frozen=True, array_like=True, tag="ack"):
    """The member has applied the state with this fencing token and number.

    It has published its in-flight counts before.
    """

    member: str
    fencing_token: Ordinal
    number: Ordinal


class ResumedMessage(Struct, frozen=True, array_like=True, tag="resumed"):
    """The engines of these workers were resumed."""

    member: str
    urls: tuple[str, ...]


class WorkerMessage(Struct, frozen=True, array_like=True, tag="worker"):
    """A worker was changed over HTTP: see `cluster.worker_changes`."""

    member: str
    revision: Ordinal
    change: bytes


class HealthMessage(Struct, frozen=True, array_like=True, tag="health"):
    """Workers, by URL, that have left or returned to rotation at a member."""

    member: str
    healthy: dict[str, bool]


class FiguresMessage(Struct, frozen=True, array_like=True, tag="figures"):
    """Figures of a member for dashboards: see `cluster.proxy_figures`."""

    member: str
    figures: ProxyFigures


class PrefixesMessage(Struct, frozen=True, array_like=True, tag="prefixes"):
    """Prefixes of prompts that the member has sent to workers.

    `hashes`: by target, packed by `cluster.prefix_hashes`.
    """

    member: str
    hashes: dict[int, bytes]


class SessionsMessage(Struct, frozen=True, array_like=True, tag="sessions"):
    """Sessions that the member has placed. `rows`: by target, of `cluster.session_places`."""

    member: str
    rows: dict[int, bytes]


class ForgottenMessage(Struct, frozen=True, array_like=True, tag="forgotten"):
    """The caches of these workers, by URL, were flushed, or emptied by a restart."""

    member: str
    urls: tuple[str, ...]


Message: TypeAlias = (
    CountsMessage
    | HelloMessage
    | ByeMessage
    | WeightsMessage
    | AckMessage
    | ResumedMessage
    | WorkerMessage
    | HealthMessage
    | FiguresMessage
    | PrefixesMessage
    | SessionsMessage
    | ForgottenMessage
)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Message | None:
    """Decode a message; None if this release can't."""
    return decode_or_none(_decoder, payload)


@lru_cache(maxsize=MAX_TARGETS)
def target_key(url: str) -> int:
    """The key of a worker's or rank's URL, equal in all proxies."""
    return int.from_bytes(blake2b(url.encode(), digest_size=8).digest(), "big")
