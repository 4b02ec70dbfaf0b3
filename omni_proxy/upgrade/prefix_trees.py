"""A prefix tree as bytes: how it gets from one program into the next.

Invariant: what is no tree is refused before anything of it is used. All integers are in this
machine's order: both programs run on it. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, TypeVar

from omni_proxy.routing.prefix_tree import ROOT, PrefixTree, TreeColumns

Holder = TypeVar("Holder", bound=Hashable)

SLICE: Final = 4096  # nodes in a piece of bytes, so that no piece takes long
_NUMBER: Final = array("I").itemsize


class UnreadableTree(Exception):
    """The bytes or columns are of no tree."""


def restore_tree(tree: PrefixTree[Holder], columns: TreeColumns[Holder]) -> None:
    """`tree` is new. Raises UnreadableTree before anything is in it."""
    tree.restore(columns.names, _nodes(columns))


def encode_tree(columns: TreeColumns[Holder]) -> Iterator[bytes]:
    """Without the names, in pieces."""
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
    """What `encode_tree` wrote of so many nodes. Raises UnreadableTree."""
    width = _mask_bytes(names)
    ends = [nodes * _NUMBER * count for count in range(4)]
    ends.append(ends[-1] + nodes * width)
    if ends[-1] > len(data):
        raise UnreadableTree(f"{len(data)} bytes are too few for {nodes} nodes")
    lengths, parents, newer = (array("I", data[a:b]) for a, b in pairwise(ends[:4]))
    held = data[ends[3] : ends[4]]
    cuts = list(accumulate(lengths, initial=ends[4]))
    if cuts[-1] != len(data):
        raise UnreadableTree(f"labels end at byte {cuts[-1]} of {len(data)}")
    labels = [data[start:end] for start, end in pairwise(cuts)]
    starts = range(0, nodes * width, width) if width else ()
    masks = [int.from_bytes(held[start : start + width], "big") for start in starts]
    return TreeColumns(labels, masks or [0] * nodes, parents, newer, list(names))


def _mask_bytes(names: Sequence[object]) -> int:
    return (len(names) + 7) // 8


def _nodes(columns: TreeColumns[Holder]) -> list[tuple[int, bytes, int]]:
    """As `PrefixTree.restore` takes them, without those that nobody holds."""
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
