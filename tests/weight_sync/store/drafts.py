"""Stored versions as a receiver makes them: announced, written to their blocks, hashed."""

from __future__ import annotations

import shutil

from omni_proxy.process_group.broadcast.tensor_hashing import start_tensor_digest
from omni_proxy.process_group.tensor_plan import TensorSpec, make_plan


def tensor_spec(name, *shape, dtype="uint8"):
    return make_plan([(name, dtype, list(shape))]).tensors[0]


def tensor_content(tensor: TensorSpec, seed: int) -> bytes:
    return bytes((seed + place) % 251 for place in range(tensor.nbytes))


def write(block, buckets, seed=0):
    """Write the tensors as a receiver does; return their digests."""
    digests = {}
    with open(block.path, "r+b") as file:
        for start, bucket in zip(block.starts, buckets, strict=True):
            file.seek(start)
            for tensor in bucket:
                data = tensor_content(tensor, seed)
                file.write(data)
                digest = start_tensor_digest(tensor)
                digest.update(data)
                digests[tensor.name] = digest.hexdigest()
    return digests


def store_version(store, buckets=None, seed=0, *, digests=True):
    """A sealed version with these buckets in one file."""
    buckets = buckets or [[tensor_spec("a", 3)], [tensor_spec("b", 2, 2), tensor_spec("c")]]
    draft = store.begin(sum(tensor.nbytes for bucket in buckets for tensor in bucket) + 4096)
    written_digests = write(draft.add(buckets), buckets, seed)
    if digests:
        draft.set_digests(written_digests)
    return store.seal(draft)


def delete_store(store):
    """Remove all its files, on disk and in memory."""
    store.close()
    for root in filter(None, (store._disk, store._memory)):
        shutil.rmtree(root, ignore_errors=True)
