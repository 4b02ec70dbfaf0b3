"""Passes prefix trees from one program to the next, in a file in memory.

    bytes of each tree | a TreeRecord for each, as JSON | length of the records, 4 bytes

Invariants: invalid data is refused before any part of it is used; a file whose writer was stopped
has no tree. Integers are in native byte order: both programs run on the same machine. A tree in use
is blocked only for the duration of `PrefixTree.columns`.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, TypeVar

import msgspec
import trio
from msgspec import Struct

from omni_proxy.config.fields import Role
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.prefix_tree import ROOT, PrefixTree, TreeColumns
from omni_proxy.shared.decoding import MALFORMED

_log = logging.getLogger(__name__)

Holder = TypeVar("Holder", bound=Hashable)

SLICE: Final = 4096  # nodes in a piece of bytes, so that no piece takes long
MAX_BYTES: Final = 256 << 20  # of a file
RESTORE_SECS: Final = 4.0  # after it the least recently used nodes are left out
_NUMBER: Final = array("I").itemsize
_LENGTH: Final = 4  # bytes


class UnreadableTree(Exception):
    """The bytes or columns are not a valid tree."""


class TreeRecord(Struct, frozen=True, kw_only=True):
    """The prefix tree of a pool's policy: its number of nodes, its size in bytes (trees follow each
    other), and the holder that each bit of a mask stands for (a URL; "" for none)."""

    role: Role
    nodes: int
    size: int
    holders: tuple[str, ...]


def tree_file() -> int:
    """The descriptor of an empty file, to be closed by the caller. Raises OSError."""
    return os.memfd_create("omni-proxy-trees", os.MFD_CLOEXEC)


async def save_trees(data_plane: DataPlane, descriptor: int) -> None:
    """Write the current trees of all policies to an empty file."""
    policies = data_plane.policies().items()
    trees = {role: policy.prefix_tree for role, policy in policies}
    columns = {role: tree.columns() for role, tree in trees.items() if tree and tree.nodes}
    if columns:
        await trio.to_thread.run_sync(write_trees, descriptor, columns)


async def load_trees(data_plane: DataPlane, descriptor: int) -> None:
    """Replace the policies' trees with those that `save_trees` has written. Holders that are not
    workers of this fleet are left out."""
    holders = {target.url: target for target in data_plane.fleet.targets()}
    until = time.monotonic() + RESTORE_SECS
    try:
        trees = await trio.to_thread.run_sync(
            read_trees, descriptor, holders, lambda: time.monotonic() < until
        )
    except UnreadableTree as error:
        _log.warning("prefix_tree_unreadable reason=%s", error)
        return
    present = set(data_plane.fleet.targets())
    for role, tree in trees.items():
        for holder in tree.holders():
            if holder not in present:  # it has left in the meantime
                tree.forget(holder)
        data_plane.policy_of(role).adopt_tree(tree)


def write_trees(descriptor: int, trees: Mapping[Role, TreeColumns[Worker]]) -> None:
    """Blocks. A tree that would make the file larger than MAX_BYTES is left out."""
    records: list[TreeRecord] = []
    total = 0
    with open(descriptor, "wb", closefd=False) as file:
        for role, columns in trees.items():
            size = _encoded_size(columns)
            if total + size > MAX_BYTES:
                _log.warning("prefix_tree_too_large pool=%s bytes=%d", role, size)
                continue
            file.writelines(encode_tree(columns))
            total += size
            holders = tuple(holder.url if holder else "" for holder in columns.names)
            nodes = len(columns.labels)
            records.append(TreeRecord(role=role, nodes=nodes, size=size, holders=holders))
        text = msgspec.json.encode(records)
        file.write(text + len(text).to_bytes(_LENGTH, "big"))


def read_trees(
    descriptor: int, holders: Mapping[str, Worker], go_on: Callable[[], bool]
) -> dict[Role, PrefixTree[Worker]]:
    """New trees by role; an empty file has none. Blocks. Once `go_on()` is false, the least
    recently used nodes are left out. Raises UnreadableTree."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    if not data:
        return {}
    end = len(data) - _LENGTH
    start = end - int.from_bytes(data[max(end, 0) :], "big")
    if start < 0:
        raise UnreadableTree("its end is missing")
    try:
        records = msgspec.json.decode(data[start:end], type=tuple[TreeRecord, ...])
    except MALFORMED as error:
        raise UnreadableTree(str(error)) from None
    trees: dict[Role, PrefixTree[Worker]] = {}
    offset = 0
    for record in records:
        names = [holders.get(url) for url in record.holders]
        columns = decode_tree(data[offset : offset + record.size], record.nodes, names)
        tree = trees[record.role] = PrefixTree(MAX_BYTES)
        restore_tree(tree, columns, go_on)
        offset += record.size
    return trees


def restore_tree(
    tree: PrefixTree[Holder], columns: TreeColumns[Holder], go_on: Callable[[], bool]
) -> None:
    """Fill an empty tree. Raises UnreadableTree before it changes anything."""
    nodes = _nodes(columns)
    tree.restore(columns.names)
    for start in range(0, len(nodes), SLICE):
        if not go_on():
            break
        tree.restore_nodes(nodes[start : start + SLICE])


def _encoded_size(columns: TreeColumns[Holder]) -> int:
    nodes = len(columns.labels)
    return nodes * (3 * _NUMBER + _mask_bytes(columns.names)) + sum(map(len, columns.labels))


def encode_tree(columns: TreeColumns[Holder]) -> Iterator[bytes]:
    """The bytes of a tree without its names, in pieces."""
    labels, masks = columns.labels, columns.masks
    width = _mask_bytes(columns.names)
    for start in range(0, len(labels), SLICE):
        yield array("I", map(len, labels[start : start + SLICE])).tobytes()
    for piece in (columns.parents, columns.newer):
        yield piece.tobytes()
    for start in range(0, len(masks), SLICE):
        yield b"".join([mask.to_bytes(width, "big") for mask in masks[start : start + SLICE]])
    for start in range(0, len(labels), SLICE):
        yield b"".join(labels[start : start + SLICE])


def decode_tree(data: bytes, nodes: int, names: Sequence[Holder | None]) -> TreeColumns[Holder]:
    """Decode the output of `encode_tree` for this number of nodes. Raises UnreadableTree."""
    width = _mask_bytes(names)
    ends = [nodes * _NUMBER * count for count in range(4)]
    ends.append(ends[-1] + nodes * width)
    if ends[-1] > len(data):
        raise UnreadableTree(f"{len(data)} bytes are too few for {nodes} nodes")
    lengths, parents, newer = (array("I", data[a:b]) for a, b in pairwise(ends[:4]))
    mask_bytes = data[ends[3] : ends[4]]
    cuts = list(accumulate(lengths, initial=ends[4]))
    if cuts[-1] != len(data):
        raise UnreadableTree(f"labels end at byte {cuts[-1]} of {len(data)}")
    labels = [data[start:end] for start, end in pairwise(cuts)]
    starts = range(0, nodes * width, width) if width else ()
    masks = [int.from_bytes(mask_bytes[start : start + width], "big") for start in starts]
    return TreeColumns(labels, masks or [0] * nodes, parents, newer, list(names))


def _mask_bytes(names: Sequence[object]) -> int:
    return (len(names) + 7) // 8


def _nodes(columns: TreeColumns[Holder]) -> list[tuple[int, bytes, int]]:
    """The nodes in the form of `PrefixTree.restore_nodes`, without nodes that have no holder."""
    labels, masks, parents, newer, names = columns
    count, known = len(labels), 1 << len(names)
    if not count == len(masks) == len(parents) == len(newer) or not count:
        raise UnreadableTree("columns of different lengths")
    order: list[int] = []
    node, passed = newer[ROOT], bytearray(count)
    while node != ROOT:
        if node >= count or passed[node] or not labels[node] or masks[node] >= known:
            raise UnreadableTree(f"node {node} is in no tree")
        passed[node] = 1
        order.append(node)
        node = newer[node]
    nodes: list[tuple[int, bytes, int]] = []
    numbers, kept = [-1] * count, [0] * count
    numbers[ROOT], kept[ROOT] = ROOT, known - 1
    edges: set[tuple[int, int]] = set()
    for node in reversed(order):
        parent, label = parents[node], labels[node]
        if parent >= count or numbers[parent] < 0:
            raise UnreadableTree(f"node {node} was used later than its parent")
        if (parent, label[0]) in edges:
            raise UnreadableTree(f"node {node} begins as another child of its parent")
        edges.add((parent, label[0]))
        numbers[node] = 0
        mask = kept[node] = masks[node] & kept[parent]
        if mask:
            nodes.append((numbers[parent], label, mask))
            numbers[node] = len(nodes)
    return nodes
