"""What proxies of a cluster publish to each other: messages in msgpack, on one channel.

Invariant: a message of an unknown kind, or one that can't be read, is dropped and nothing else:
proxies of two releases may share a store. A worker stands as 8 bytes of the hash of its URL, for
its counts are sent up to twenty times a second. Pure.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from omni_proxy.cluster.proxy_figures import ProxyFigures

MAX_TARGETS: Final = 1 << 17  # workers and ranks: as many as the shared counters have cells, twice


class CountsMessage(Struct, frozen=True, array_like=True, tag="counts"):
    """`number` rises by one. `whole`: targets that are missing have none in flight; else they are
    as before. `total`: requests in flight at this proxy; `waits`: some wait for a worker."""

    member: str
    number: int
    whole: bool
    total: int
    waits: bool
    in_flight: dict[int, int]


class HelloMessage(Struct, frozen=True, array_like=True, tag="hello"):
    """A member begins to listen: the others publish their counts whole."""

    member: str


class ByeMessage(Struct, frozen=True, array_like=True, tag="bye"):
    """A member ends: its counts hold no longer."""

    member: str


class WeightsMessage(Struct, frozen=True, array_like=True, tag="weights"):
    """What the holder of the lease on weights has written into the store: see
    `cluster_member.weight_state`. Each member applies and acknowledges it."""

    member: str
    state: bytes


class AckMessage(Struct, frozen=True, array_like=True, tag="ack"):
    """The state with that number, of the holder with that token, is in force at this member; what
    it has in flight was published before."""

    member: str
    token: int
    number: int


class ResumedMessage(Struct, frozen=True, array_like=True, tag="resumed"):
    """The engines of these workers were made to continue."""

    member: str
    urls: tuple[str, ...]


class WorkerMessage(Struct, frozen=True, array_like=True, tag="worker"):
    """A worker was changed over HTTP: see `cluster.worker_changes`."""

    member: str
    revision: int
    change: bytes


class HealthMessage(Struct, frozen=True, array_like=True, tag="health"):
    """Workers, by URL, that have left or come back into rotation at a member."""

    member: str
    healthy: dict[str, bool]


class FiguresMessage(Struct, frozen=True, array_like=True, tag="figures"):
    """What screens show of a member: see `cluster.proxy_figures`."""

    member: str
    figures: ProxyFigures


class PrefixesMessage(Struct, frozen=True, array_like=True, tag="prefixes"):
    """Beginnings of prompts that the member has sent somewhere: by target, hashes as
    `cluster.prefix_hashes` packs them."""

    member: str
    hashes: dict[int, bytes]


class SessionsMessage(Struct, frozen=True, array_like=True, tag="sessions"):
    """Sessions that the member has placed: by target, rows of `cluster.session_places`."""

    member: str
    rows: dict[int, bytes]


class ForgottenMessage(Struct, frozen=True, array_like=True, tag="forgotten"):
    """The caches of these workers, by URL, are empty: they were flushed or restarted."""

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
    """None for what this release can't read."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@lru_cache(maxsize=MAX_TARGETS)
def target_key(url: str) -> int:
    """Of a worker's URL, or a rank's; equal in every proxy."""
    return int.from_bytes(blake2b(url.encode(), digest_size=8).digest(), "big")
