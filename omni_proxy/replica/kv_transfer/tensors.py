"""KVs as bytes, and the digests that decide whether two replicas may share a KV.

Invariant: a KV read from bytes equals the KV that was written, byte for byte; nothing is converted.
Digests are over the live weights: compute them in the stage's thread, while no operation changes a
weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from omni_proxy.replica.kv_transfer.wire import Identity
from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.text_model import ModelWorker

DIGEST_THREADS = 4  # hashing releases the interpreter lock


def identity(worker: ModelWorker, weight_version: str, weights: str) -> Identity:
    config = worker.text.model.config
    return Identity(
        model=worker.text.name,
        sizes=", ".join(f"{name} {value}" for name, value in asdict(config).items()),
        dtype=worker.dtype,
        weight_version=weight_version,
        weights=weights,
    )


def weights_digest(worker: ModelWorker) -> str:
    """SHA-256 over names, shapes and digests of all weights.

    Slow: reads all weights once, in several threads.
    """

    def line(item: tuple[str, Tensor]) -> str:
        name, weight = item
        digest = hashlib.sha256(byte_view(weight.data)).hexdigest()
        return f"{name} {tuple(weight.shape)} {weight.dtype} {digest}\n"

    weights = sorted(worker.text.model.named_parameters())
    with ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="digest") as pool:
        lines = "".join(pool.map(line, weights))
    return hashlib.sha256(lines.encode()).hexdigest()


def prompt_digest(tokens: Sequence[int]) -> str:
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(token.to_bytes(8, "big"))
    return digest.hexdigest()


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a tensor: its own memory if it is contiguous, else a copy."""
    array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def layer_of(kv: SequenceKV, layer: int, tokens: int) -> Tensor:
    """Copy the keys and values of the first `tokens` tokens: [2, kv_heads, tokens, head_size]."""
    return kv.layer(layer)[:, :, :tokens].clone(memory_format=torch.contiguous_format)


def layer_buffer(kv: SequenceKV, tokens: int) -> Tensor:
    """An uninitialized tensor of the shape that `layer_of` returns."""
    layer = kv.layer(0)
    return layer.new_empty((layer.shape[0], layer.shape[1], tokens, layer.shape[3]))


def layer_bytes(kv: SequenceKV, tokens: int) -> int:
    """Bytes of one layer's KV of `tokens` tokens."""
    shape = kv.shape
    return 2 * shape.kv_heads * tokens * shape.head_size * kv.layer(0).element_size()


def kv_bytes(kv: SequenceKV, tokens: int) -> int:
    """Bytes of the whole KV of `tokens` tokens."""
    return kv.shape.layers * layer_bytes(kv, tokens)


def put_layer(kv: SequenceKV, layer: int, rows: Tensor) -> None:
    """Write what `layer_of` returned; the tokens are used once `length` is advanced."""
    kv.layer(layer)[:, :, : rows.shape[2]] = rows
