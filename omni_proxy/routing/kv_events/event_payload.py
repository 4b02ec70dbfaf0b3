"""Decodes a batch of KV events: MessagePack, in the forms of vLLM and SGLang.

A batch is `[time, [event, ...], rank?]`. An event is a map with a `type`, or an array whose first
element is the type and whose later ones may be missing; both forms may have fields of later
versions, which are ignored. Invariant: any bytes give a `DecodedBatch` or `UndecodablePayload`; an
event that can't be read reliably is counted in `undecodable`, never skipped silently.
Sources: note:features 7, note:real-engines 4 (vLLM 0.32.0), captures of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from omni_proxy.shared.decoding import MALFORMED

MAX_BLOCK_SIZE: Final = 65536  # tokens
MAX_TOKEN: Final = (1 << 32) - 1
MAX_UNDECODABLE: Final = 1000  # events of a batch; later ones are not decoded
_WORD: Final = (1 << 64) - 1
# Order of the fields in the array form; a map has them by name.
_STORED_FIELDS: Final = (
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
)  # fmt: skip
_REMOVED_FIELDS: Final = ("type", "block_hashes", "medium", "group_idx")
_FULL_ATTENTION: Final = "full_attention"
# If one of these is set, the same tokens are a different block.
_NOT_PLAIN: Final = ("lora_id", "lora_name", "cache_salt", "extra_key")

_decode = msgspec.msgpack.Decoder().decode


class UndecodablePayload(Exception):
    """The bytes are not a batch of events."""


class StoredEvent(NamedTuple):
    """Consecutive blocks; the first one follows `parent`.

    `hashes`: the engine's names of the blocks, 64 bits. `plain`: how many of them, from the first,
    are only tokens of the base model; later ones are of an adapter, a cache salt or media, which
    plain requests can't use. `group`: of layers; None if the engine names none.
    """

    hashes: list[int]
    parent: int | None  # None: the first block of a prompt
    tokens: Sequence[int]
    block_size: int
    medium: str
    group: int | None
    plain: int


class RemovedEvent(NamedTuple):
    """`medium` "" and `group` None: all media, all groups."""

    hashes: list[int]
    medium: str
    group: int | None


class ClearedEvent(NamedTuple):
    """The cache is empty."""


DecodedEvent: TypeAlias = StoredEvent | RemovedEvent | ClearedEvent


class DecodedBatch(NamedTuple):
    """`published_at`: the engine's time in seconds, 0 if missing. `rank`: the data-parallel rank,
    None if missing. `undecodable`: for each event that could not be read, the reason."""

    published_at: float
    events: list[DecodedEvent]
    rank: int | None
    undecodable: list[str]


def decode_batch(payload: bytes) -> DecodedBatch:
    """Raises UndecodablePayload."""
    try:
        body = _decode(payload)
    except MALFORMED as error:
        raise UndecodablePayload(f"not MessagePack: {error}") from None
    if isinstance(body, dict):
        timestamp, rows = body.get("ts"), body.get("events")
        rank = body.get("data_parallel_rank", body.get("dp_rank"))
    elif isinstance(body, list) and len(body) >= 2:
        timestamp, rows, rank = body[0], body[1], body[2] if len(body) > 2 else None
    else:
        raise UndecodablePayload("not a batch of events")
    if not isinstance(rows, list):
        raise UndecodablePayload("a batch without a list of events")
    published_at = float(timestamp) if isinstance(timestamp, int | float) else 0.0
    batch = DecodedBatch(published_at, [], rank if type(rank) is int else None, [])
    for row in rows:
        try:
            event = _event(row)
        except (ValueError, TypeError, LookupError) as error:
            batch.undecodable.append(f"{_kind(row)}: {error}"[:200])
            if len(batch.undecodable) >= MAX_UNDECODABLE:
                break
        else:
            if event is not None:
                batch.events.append(event)
    return batch


def _kind(row: object) -> str:
    kind: object = None
    if isinstance(row, dict):
        kind = row.get("type")
    elif isinstance(row, list) and row:
        kind = row[0]
    return kind[:64] if isinstance(kind, str) and kind.isprintable() else "an event without a type"


def _event(row: object) -> DecodedEvent | None:
    """None for an event to be ignored. Raises ValueError, TypeError or LookupError."""
    match _kind(row):
        case "BlockStored":
            return _stored(_stored_fields(row) if isinstance(row, list) else _map(row))
        case "BlockRemoved":
            return _removed(_fields(row, _REMOVED_FIELDS) if isinstance(row, list) else _map(row))
        case "AllBlocksCleared":
            return ClearedEvent()
    raise ValueError("an unknown type of event")


def _map(row: object) -> Mapping[str, Any]:
    assert isinstance(row, dict)
    return row


def _fields(row: list[Any], names: Sequence[str]) -> dict[str, Any]:
    return dict(zip(names, row, strict=False))


def _stored_fields(row: list[Any]) -> dict[str, Any]:
    """The field after `medium` is a list of component types or a map with the cache salt, depending
    on SGLang's version; in vLLM it is the adapter's name. Its type tells which one it is."""
    fields = _fields(row, _STORED_FIELDS)
    behind = row[len(_STORED_FIELDS) :]
    if not behind:
        return fields
    if isinstance(behind[0], dict):
        return fields | {"metadata": behind[0]}
    if isinstance(behind[0], list):
        return fields
    names = ("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind")
    return fields | _fields(behind, names)


def _stored(fields: Mapping[str, Any]) -> StoredEvent | None:
    kind, group = fields.get("kv_cache_spec_kind"), _group(fields)
    if kind is not None and kind != _FULL_ATTENTION:
        return None
    if kind is None and group not in (None, 0):
        return None  # the kind of its layers is unknown
    hashes = _hashes(fields["block_hashes"])
    parent = fields.get("parent_block_hash")
    tokens, size = fields["token_ids"], fields["block_size"]
    if type(size) is not int or not 0 < size <= MAX_BLOCK_SIZE:
        raise ValueError("block_size is invalid")
    if not isinstance(tokens, list) or len(tokens) != size * len(hashes):
        raise ValueError("token_ids don't fill the blocks")
    if tokens and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) > MAX_TOKEN):
        raise ValueError("token_ids has an invalid id")
    return StoredEvent(
        hashes, None if parent is None else _word(parent), tokens, size, _medium(fields), group,
        _plain(fields, len(hashes)),
    )  # fmt: skip


def _removed(fields: Mapping[str, Any]) -> RemovedEvent:
    return RemovedEvent(_hashes(fields["block_hashes"]), _medium(fields), _group(fields))


def _hashes(value: object) -> list[int]:
    if not isinstance(value, list):
        raise TypeError("block_hashes is not a list")
    return [_word(block_hash) for block_hash in value]


def _word(value: object) -> int:
    """A hash as 64 bits: a signed or unsigned integer, or a digest of any length."""
    if type(value) is int:
        return value & _WORD
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise TypeError("a block hash is neither an integer nor bytes")


def _medium(fields: Mapping[str, Any]) -> str:
    medium = fields.get("medium")
    if medium is None:
        return ""
    if not isinstance(medium, str):
        raise TypeError("medium is not a string")
    return medium


def _group(fields: Mapping[str, Any]) -> int | None:
    group = fields.get("group_idx")
    if group is not None and type(group) is not int:
        raise TypeError("group_idx is not an integer")
    return group


def _plain(fields: Mapping[str, Any], blocks: int) -> int:
    """How many blocks, from the first, depend only on their tokens."""
    metadata = fields.get("metadata")
    sources = (fields, metadata) if isinstance(metadata, dict) else (fields,)
    if any(source.get(name) for source in sources for name in _NOT_PLAIN):
        return 0
    extra = fields.get("extra_keys")
    if extra is None:
        return blocks
    if not isinstance(extra, list) or len(extra) != blocks:
        raise ValueError("extra_keys does not have one entry per block")
    return next((index for index, keys in enumerate(extra) if keys), blocks)
