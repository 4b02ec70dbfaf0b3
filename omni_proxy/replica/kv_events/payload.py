"""A batch of block events as MessagePack, in vLLM's form or in SGLang's.

    both    [unix seconds, [event ...], rank]
    vllm    an event is a map with its `type`; hashes are unsigned
    sglang  an event is an array that begins with its type, one for each block; hashes are signed
Contract: real-engines.md 4 (vLLM 0.32.0), features.md 7 (SGLang). Fields that describe what this
engine lacks (adapters, salts, other attention) have the values that stand for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from omni_proxy.replica.kv_events.held_blocks import BlockEvent, BlocksRemoved, BlocksStored
from omni_proxy.replica.kv_events.settings import Form

MEDIUM: Final = "GPU"  # also on a CPU, as vLLM has it: the first tier of a cache
RANK: Final = 0
_encoder = msgspec.msgpack.Encoder()


def encode_batch(form: Form, block_size: int, unix_secs: float, events: list[BlockEvent]) -> bytes:
    convert = _vllm_events if form == "vllm" else _sglang_events
    return _encoder.encode([unix_secs, list(convert(events, block_size)), RANK])


def _vllm_events(events: Iterable[BlockEvent], block_size: int) -> Iterator[dict[str, Any]]:
    for event in events:
        match event:
            case BlocksStored(hashes, parent, tokens):
                yield {
                    "type": "BlockStored",
                    "block_hashes": hashes,
                    "parent_block_hash": parent,
                    "token_ids": tokens,
                    "block_size": block_size,
                    "lora_id": None,
                    "medium": MEDIUM,
                    "lora_name": None,
                    "extra_keys": [None] * len(hashes),
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            case BlocksRemoved(hashes):
                for each in hashes:
                    yield {
                        "type": "BlockRemoved",
                        "block_hashes": [each],
                        "medium": MEDIUM,
                        "group_idx": 0,
                    }
            case _:
                yield {"type": "AllBlocksCleared"}


def _sglang_events(events: Iterable[BlockEvent], block_size: int) -> Iterator[list[Any]]:
    for event in events:
        match event:
            case BlocksStored(hashes, parent, tokens):
                above = None if parent is None else _signed(parent)
                for number, each in enumerate(hashes):
                    own = tokens[number * block_size : (number + 1) * block_size]
                    yield ["BlockStored", [_signed(each)], above, own, block_size, None, MEDIUM]
                    above = _signed(each)
            case BlocksRemoved(hashes):
                for each in hashes:
                    yield ["BlockRemoved", [_signed(each)], MEDIUM]
            case _:
                yield ["AllBlocksCleared"]


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
