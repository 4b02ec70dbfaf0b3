"""The protocol between decode and prefill replicas on one TCP connection, and its errors. Pure.

    decode ──HELLO──> prefill        the requested KV, and decode's model and weights
           <──WAIT*── <──OFFER──     prefill is computing the KV; then the sizes to read
           <──DATA──…                one frame per layer, then one with the last token's logits
           ──DONE──>                 prefill may free the KV
           <──REFUSE──               instead of any answer: why there is no KV
A frame is 12 bytes (magic, version, kind, length; big-endian) and a body, which is raw bytes for
DATA and msgpack otherwise.
Invariant: a length above the bound of its kind is refused before a byte of the body is read.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

MAGIC: Final = b"OKVT"
VERSION: Final = 1
HEADER = struct.Struct(">4sHHI")
MAX_BODY_BYTES: Final = 64 * 1024
MAX_DATA_BYTES: Final = 2**31
# Prefix of every error of a transfer in a response, named as in SGLang: routers look for it.
KV_ERROR: Final = "KVTransferError"


class WireError(Exception):
    """The peer does not follow this protocol; the connection is unusable."""


class TransferFailed(Exception):
    """A transfer failed; the message is the one for the client, without the prefix."""


class ConnectionEnded(TransferFailed):
    """The peer closed the connection, or the connection was lost."""


class FrameKind(IntEnum):
    HELLO = 1
    WAIT = 2
    OFFER = 3
    DATA = 4
    DONE = 5
    REFUSE = 6


class Identity(Struct, frozen=True):
    """The properties that two replicas must share for one to use the other's KVs.

    `sizes` describes the model's sizes as text; `weights` is the digest of all its weights.
    """

    model: str
    sizes: str
    dtype: str
    weight_version: str
    weights: str


class Hello(Struct, frozen=True):
    """Decode's request for a KV; `prompt` is the digest of its `tokens` token ids."""

    key: str
    engine_id: str
    prompt: str
    tokens: int
    identity: Identity


class Offer(Struct, frozen=True):
    """The sizes of the DATA frames that follow: `layers` of `layer_bytes`, then the logits.

    `cached_tokens` is the number of prompt tokens that prefill had in its prefix cache.
    """

    layers: int
    layer_bytes: int
    logits_bytes: int
    cached_tokens: int


class Refuse(Struct, frozen=True):
    reason: str


Body = TypeVar("Body", Hello, Offer, Refuse)
BODIES: Final = {FrameKind.HELLO: Hello, FrameKind.OFFER: Offer, FrameKind.REFUSE: Refuse}


def frame(kind: FrameKind, body: bytes = b"") -> bytes:
    """A complete frame."""
    return header(kind, len(body)) + body


def header(kind: FrameKind, length: int) -> bytes:
    """The header of a frame whose body follows separately. Raises ValueError if it is too long."""
    if length > bound(kind):
        raise ValueError(f"{length} bytes are over the limit of a {kind.name} frame")
    return HEADER.pack(MAGIC, VERSION, kind, length)


def message(kind: FrameKind, body: Hello | Offer | Refuse) -> bytes:
    return frame(kind, msgspec.msgpack.encode(body))


def bound(kind: FrameKind) -> int:
    """The longest body of a frame of this kind, in bytes."""
    if kind in BODIES:
        return MAX_BODY_BYTES
    return MAX_DATA_BYTES if kind is FrameKind.DATA else 0


def parse_header(data: bytes) -> tuple[FrameKind, int]:
    """The kind of a frame, and the length of its body. Raises WireError."""
    magic, version, number, length = HEADER.unpack(data)
    if magic != MAGIC:
        raise WireError("the peer is not the KV transfer port of a replica")
    if version != VERSION:
        raise WireError(f"the peer has version {version} of the protocol, this one {VERSION}")
    try:
        kind = FrameKind(number)
    except ValueError:
        raise WireError(f"a frame of unknown kind {number}") from None
    if length > bound(kind):
        raise WireError(f"a {kind.name} frame of {length} bytes; the limit is {bound(kind)}")
    return kind, length


def parse(body: bytes, form: type[Body]) -> Body:
    """Raises WireError."""
    try:
        return msgspec.msgpack.decode(body, type=form)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"an invalid {form.__name__} message: {error}") from None


def prompt_digest(tokens: Sequence[int]) -> str:
    """The digest of a prompt's token ids, by which both sides name it."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(token.to_bytes(8, "big"))
    return digest.hexdigest()


def difference(decode: Identity, prefill: Identity) -> str:
    """Why decode cannot use a KV of prefill, as text for either side; "" if it can."""
    if decode.sizes != prefill.sizes:
        return (
            f"the models differ: decode has {decode.model} ({decode.sizes}), prefill "
            f"{prefill.model} ({prefill.sizes})"
        )
    if decode.dtype != prefill.dtype:
        return f"the KV is {prefill.dtype} at prefill and {decode.dtype} at decode"
    if decode.weight_version != prefill.weight_version:
        return (
            f"the weights differ: version {prefill.weight_version!r} at prefill, "
            f"{decode.weight_version!r} at decode"
        )
    if decode.weights != prefill.weights:
        return f"the weights differ, although both are called {decode.weight_version!r}"
    return ""
