"""A radix tree of texts and their holders: the workers that most likely have a prefix cached.

Sizes are bytes of text; a text with several holders counts once in `size`. Nodes are numbers and
their fields are columns: objects would take more memory and burden the garbage
collector. Invariants: a holder of a node also holds its parent; a parent is more recently used than
its children, so the least recently used node is a leaf. Each call does a bounded amount of upkeep,
and `size` never exceeds 5/4 of `max_size` by more than one text. While `_prune` has work left, a
holder may still be on nodes below a node that it has lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Final, Generic, NamedTuple

from msgspec import Struct

from omni_proxy.routing.holder_bits import Holder, lowest_free_bit, mask_of

ROOT = 0
EVICTED_PER_SLICE = 256  # nodes
EVICTED_PER_INSERT = 128
SWEPT_PER_SLICE = 512
SWEPT_PER_INSERT = 16
DROPPED_PER_SLICE = 16
PRUNED_PER_SLICE = 64  # nodes; finding their children is slow
PRUNED_PER_REPORT = 8
PRUNED_PER_INSERT = 1
MAX_TO_PRUNE: Final = 4096
MASKS_KNOWN: Final = 256  # masks with cached holders: the same few masks are matched again
_WRAP: Final = 0xFFFFFFFF
# A node takes up to 200 bytes in addition to its label: texts that differ in one byte would fill
# the memory long before their labels fill `max_size`. With this limit of nodes, the whole tree
# takes at most 5/4 + 200/128 bytes for each byte of `max_size`, for any texts.
BYTES_PER_NODE = 128
MIN_NODES = 1024
_DIGITS = bytes.maketrans(b"01", b"\0\1")  # as truth values
NARROW = 64  # bytes at or below which an XOR is faster than further halving


def common_length(label: bytes, text: bytes, offset: int) -> int:
    """Length of the common prefix of `label` and `text[at:]`."""
    low, high = 0, min(len(label), len(text) - offset)
    while high - low > NARROW:
        middle = (low + high) >> 1
        if label[low:middle] == text[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    difference = int.from_bytes(label[low:high], "little") ^ int.from_bytes(
        text[offset + low : offset + high], "little"
    )
    if not difference:
        return high
    return low + (((difference & -difference).bit_length() - 1) >> 3)


class InsertedText(Struct, gc=False):
    """The node where a text of `length` bytes ended when it was inserted; `held`: how many of these
    bytes its holder had before. If `generation` has changed, the node's number was reused."""

    node: int
    generation: int
    length: int
    held: int


class TreeColumns(NamedTuple, Generic[Holder]):
    """A snapshot of a tree, indexed by node number: the text that each adds to its parent's (b"":
    vacant number), the mask of its holders, its parent, and the node used next after it (for the
    root: the oldest). `names`: holders by the index of their bit; None: removed holder."""

    labels: list[bytes]
    masks: list[int]
    parents: array[int]
    newer: array[int]
    names: list[Holder | None]


class PrefixTree(Generic[Holder]):
    """Each holder is a bit, so that sets of them are plain integers (masks)."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.size = 0
        self.nodes = 0
        self.membership = 0  # changes whenever a holder is added or removed
        self._bits: dict[Holder, int] = {}
        self._names: list[Holder | None] = []  # by index of the bit
        self._sizes: dict[int, int] = {}
        self._live = 0
        self._dead = 0  # removed holders that are still on nodes
        self._sweeping = 0  # the part of `_dead` that the present pass removes
        self._cursor = 1
        self._discarded: list[object] = []
        self._named: tuple[int, dict[int, tuple[Holder, ...]]] = (0, {})  # (membership, cache)
        self._generation = 0
        # Subtrees that a holder has lost, except for texts used at `number` or later:
        # (node, generation, holder, number).
        self._lost: list[tuple[int, int, Holder, int]] = []
        self._init_columns()

    def _init_columns(self) -> None:
        self._labels: list[bytes] = [b""]
        self._masks: list[int] = [0]
        self._parents = array("I", [ROOT])
        self._child_counts = array("H", [0])
        self._used = array("Q", [0])  # `number` of the latest `insert`
        self._generations = array("I", [0])  # changes whenever a node number is vacated
        # A ring by last use, through the root: newer[ROOT] is the oldest, older[ROOT] the newest.
        self._older = array("I", [ROOT])
        self._newer = array("I", [ROOT])
        # By first byte: parent -> child. Many tables, so that growing one never takes long.
        self._edges: list[dict[int, int]] = [{} for _ in range(256)]
        self._free = array("I")

    def _reset(self) -> None:
        """The memory of the columns is freed in steps, because freeing it in one takes too long."""
        columns = (self._labels, self._masks, self._parents, self._child_counts, self._older)
        more = (self._newer, self._used, self._generations, self._free)
        self._discarded += [*columns, *more, *self._edges]
        self._generation = (self._generation + 1) & _WRAP
        self._init_columns()

    @property
    def max_nodes(self) -> int:
        return max(MIN_NODES, self.max_size // BYTES_PER_NODE)

    @property
    def oversized(self) -> bool:
        return self.size > self.max_size or self.nodes > self.max_nodes

    def holders(self) -> list[Holder]:
        return list(self._bits)

    def size_of(self, holder: Holder) -> int:
        """Bytes of the texts that the holder has."""
        return self._sizes.get(self._bits.get(holder, 0), 0)

    def sizes_of(self, holders: Iterable[Holder]) -> list[int]:
        bits, sizes = self._bits.get, self._sizes.get
        return [sizes(bits(holder, 0), 0) for holder in holders]

    def mask_of(self, holders: Iterable[Holder]) -> int:
        return mask_of(self._bits, holders)

    def named(self, mask: int) -> Sequence[Holder]:
        if self._named[0] != self.membership:
            self._named = (self.membership, {})
        by_mask = self._named[1]
        holders = by_mask.get(mask)
        if holders is None:
            digits = bin(mask)[:1:-1].encode().translate(_DIGITS)
            holders = tuple(name for name in compress(self._names, digits) if name is not None)
            if len(by_mask) < MASKS_KNOWN:
                by_mask[mask] = holders
        return holders

    def match(self, text: bytes, among: int = -1) -> tuple[int, int]:
        """The longest prefix of the text, in bytes, that a holder of the mask `among` has, and the
        mask of its holders. Changes nothing; only `insert` counts as a use."""
        edges, labels, masks = self._edges, self._labels, self._masks
        among &= self._live
        node, offset, end, holders = ROOT, 0, len(text), 0
        while offset < end:
            child = edges[text[offset]].get(node)
            if child is None:
                break
            mask = masks[child] & among
            if not mask:
                break
            holders = mask
            label = labels[child]
            if not text.startswith(label, offset):
                offset += common_length(label, text, offset)
                break
            offset += len(label)
            node = child
        return offset, holders

    def depths(self, text: bytes, among: int = -1) -> dict[Holder, int]:
        """The matching length, in bytes, of each holder of the mask `among` that has any."""
        lengths: dict[Holder, int] = {}
        edges, labels, masks = self._edges, self._labels, self._masks
        node, offset, end, remaining = ROOT, 0, len(text), among & self._live
        while remaining and offset < end:
            child = edges[text[offset]].get(node)
            if child is None:
                break
            mask = masks[child] & remaining
            if offset and mask != remaining:
                lengths.update(dict.fromkeys(self.named(remaining & ~mask), offset))
            remaining = mask
            label = labels[child]
            if not text.startswith(label, offset):
                offset += common_length(label, text, offset)
                break
            offset += len(label)
            node = child
        if offset:
            lengths.update(dict.fromkeys(self.named(remaining), offset))
        return lengths

    def insert(self, text: bytes, holder: Holder, number: int = 0) -> InsertedText | None:
        """Add `holder` to the text, which counts as a use. `number`: sequence number of this use
        that never decreases, or 0: then None is returned, so `forget_below` can't be used."""
        self._maintain()
        if self.size > self.max_size + (self.max_size >> 2):
            return None  # eviction can't keep up with very many short labels: add nothing
        bit = self._bits.get(holder) or self._admit(holder)
        edges, labels, masks = self._edges, self._labels, self._masks
        node, offset, end, path, grown = ROOT, 0, len(text), [], 0
        held_length = end
        while offset < end:
            child = edges[text[offset]].get(node)
            if child is None:
                held_length = min(held_length, offset)
                path.append(self._add_leaf(node, text[offset:], bit))
                grown += end - offset
                break
            label = labels[child]
            if not text.startswith(label, offset):
                child = self._split(child, common_length(label, text, offset))
                label = labels[child]
            mask = masks[child]
            if not mask & bit:
                masks[child] = mask = mask | bit
                grown += len(label)
                held_length = min(held_length, offset)
            offset += len(label)
            if node and self._child_counts[node] == 1 and masks[node] == mask:
                path.pop()
                self._join(node, child)
            path.append(child)
            node = child
        self._sizes[bit] += grown
        self._use(path, number)
        if not number or not end:
            return None
        last = path[-1]
        return InsertedText(last, self._generations[last], end, held_length)

    def forget_below(self, text: InsertedText, holder: Holder, length: int, before: int) -> None:
        """Remove `holder` from everything below the first `length` bytes of this text, branches
        included, except for texts used at number `before` or later, such as this text itself."""
        node, numbers = text.node, self._generations
        if length >= text.length or node >= len(numbers) or numbers[node] != text.generation:
            return  # nothing is below, or it was evicted since, or joined with its child
        start = text.length - len(self._labels[node])
        while start > length and node != ROOT:
            node = self._parents[node]
            start -= len(self._labels[node])
        if node != ROOT and len(self._lost) < MAX_TO_PRUNE:
            self._lost.append((node, numbers[node], holder, before))
            self._prune(PRUNED_PER_REPORT)

    def forget(self, holder: Holder) -> None:
        """Remove the holder; the memory is freed in steps."""
        bit = self._bits.pop(holder, 0)
        if bit:
            del self._sizes[bit]
            self._names[bit.bit_length() - 1] = None
            self.membership += 1
            self._live &= ~bit
            self._dead |= bit

    def clear(self) -> None:
        for holder in self.holders():
            self.forget(holder)

    def columns(self) -> TreeColumns[Holder]:
        """A copy, for a new program in an upgrade; blocks for milliseconds if the tree is large."""
        dead = self._dead
        return TreeColumns(
            list(self._labels), [mask & ~dead for mask in self._masks], self._parents[:],
            self._newer[:], list(self._names),
        )  # fmt: skip

    def restore(self, names: Sequence[Holder | None]) -> None:
        """Take the holders of another tree. This tree must be new, and until all nodes are restored
        only `restore_nodes` may be called."""
        for place, holder in enumerate(names):
            self._names.append(holder)
            if holder is None:
                self._dead |= 1 << place
            else:
                self._bits[holder], self._sizes[1 << place] = 1 << place, 0
                self._live |= 1 << place
        self.membership += 1

    def restore_nodes(self, nodes: Iterable[tuple[int, bytes, int]]) -> None:
        """Add the next nodes: parent (the number of an earlier node, from 1 on, or ROOT), label
        and mask; the most recently used node comes first."""
        older, newer = self._older, self._newer
        for parent, label, mask in nodes:
            node = self._add_leaf(parent, label, mask)
            oldest = newer[ROOT]
            older[oldest] = newer[ROOT] = node
            older[node], newer[node] = ROOT, oldest
            for holder in self.named(mask):
                self._sizes[self._bits[holder]] += len(label)

    def maintain(self, *, evict: bool) -> bool:
        """Do one slice of upkeep; returns whether more is left. `evict`: shrink to `max_size`."""
        if self._dead:
            self._sweep(SWEPT_PER_SLICE)
        elif self._lost:
            self._prune(PRUNED_PER_SLICE)
        elif self._discarded:
            del self._discarded[-DROPPED_PER_SLICE:]
        elif evict:
            self._evict(EVICTED_PER_SLICE, self.max_size)
        return bool(self._dead or self._discarded or self._lost) or (evict and self.oversized)

    def _maintain(self) -> None:
        """Upkeep at every insert, so that neither new texts nor removed holders accumulate."""
        if self._dead:
            self._sweep(SWEPT_PER_INSERT)
        elif self._lost:
            self._prune(PRUNED_PER_INSERT)
        elif self._discarded:
            self._discarded.pop()
        allowed = self.max_size + (self.max_size >> 3)
        if self.size > allowed or self.nodes > self.max_nodes:
            self._evict(EVICTED_PER_INSERT, allowed)

    def _admit(self, holder: Holder) -> int:
        bit = lowest_free_bit(self._live | self._dead)
        self._bits[holder] = bit
        bit_index = bit.bit_length() - 1
        if bit_index == len(self._names):
            self._names.append(None)
        self._names[bit_index] = holder
        self.membership += 1
        self._sizes[bit] = 0
        self._live |= bit
        return bit

    def _new(self, label: bytes, mask: int, parent: int) -> int:
        self.nodes += 1
        if self._free:
            node = self._free.pop()
            self._labels[node] = label
            self._masks[node] = mask
            self._parents[node] = parent
            self._used[node] = 0
        else:
            node = len(self._labels)
            self._labels.append(label)
            self._masks.append(mask)
            self._parents.append(parent)
            self._child_counts.append(0)
            self._used.append(0)
            self._generations.append(self._generation)
            self._older.append(node)
            self._newer.append(node)
        self._edges[label[0]][parent] = node
        return node

    def _add_leaf(self, parent: int, label: bytes, mask: int) -> int:
        self.size += len(label)
        self._child_counts[parent] += 1
        return self._new(label, mask, parent)

    def _split(self, node: int, length: int) -> int:
        """Insert a parent that takes the first `length` bytes of the node's label."""
        label = self._labels[node]
        upper = self._new(label[:length], self._masks[node] & self._live, self._parents[node])
        self._labels[node] = label[length:]
        self._parents[node] = upper
        self._edges[label[length]][upper] = node
        self._child_counts[upper] = 1
        self._used[upper] = self._used[node]
        return upper

    def _join(self, node: int, only: int) -> None:
        """Replace a node by its only child, whose label is extended by that of the node."""
        label, lower = self._labels[node], self._labels[only]
        parent = self._parents[node]
        self._edges[label[0]][parent] = only
        del self._edges[lower[0]][node]
        self._parents[only] = parent
        self._labels[only] = label + lower
        self._free_node(node)

    def _use(self, path: list[int], number: int) -> None:
        """Mark the nodes as used, the deepest first: a parent is newer than its children."""
        older, newer, used = self._older, self._newer, self._used
        newest = older[ROOT]
        for node in reversed(path):
            used[node] = number
            if node == newest:
                continue
            before, after = older[node], newer[node]
            newer[before] = after
            older[after] = before
            newer[newest] = node
            older[node] = newest
            newest = node
        newer[newest] = ROOT
        older[ROOT] = newest

    def _evict(self, budget: int, down_to: int) -> None:
        max_nodes = self.max_nodes
        while budget and (self.size > down_to or self.nodes > max_nodes):
            self._remove(self._newer[ROOT])
            budget -= 1

    def _remove(self, leaf: int) -> None:
        label = self._labels[leaf]
        parent = self._parents[leaf]
        del self._edges[label[0]][parent]
        self._child_counts[parent] -= 1
        self.size -= len(label)
        mask = self._masks[leaf] & self._live
        while mask:
            bit = mask & -mask
            self._sizes[bit] -= len(label)
            mask ^= bit
        self._free_node(leaf)

    def _free_node(self, node: int) -> None:
        before, after = self._older[node], self._newer[node]
        self._newer[before] = after
        self._older[after] = before
        self._older[node] = self._newer[node] = node
        self._labels[node] = b""
        self._masks[node] = 0
        self._child_counts[node] = 0
        self._generations[node] = self._generation = (self._generation + 1) & _WRAP
        self._free.append(node)
        self.nodes -= 1

    def _prune(self, budget: int) -> None:
        """Continue to remove holders from lost subtrees: from the top, so matches stop there."""
        lost, masks, generations = self._lost, self._masks, self._generations
        while budget and lost:
            node, generation, holder, before = lost.pop()
            bit = self._bits.get(holder, 0)
            if node >= len(generations) or generations[node] != generation:
                continue
            if not masks[node] & bit:
                continue
            budget -= 1
            lost += [
                (child, generations[child], holder, before)
                for child in self._children(node)
                if masks[child] & bit
            ]
            if self._used[node] >= before:
                continue
            masks[node] &= ~bit
            self._sizes[bit] -= len(self._labels[node])
            while self._abandoned(node):
                parent = self._parents[node]
                self._remove(node)
                node = parent

    def _children(self, node: int) -> list[int]:
        count = self._child_counts[node]
        children: list[int] = []
        for table in self._edges:
            if len(children) == count:
                break
            child = table.get(node)
            if child is not None:
                children.append(child)
        return children

    def _sweep(self, budget: int) -> None:
        """Remove dead holders from the nodes, and nodes without holders from the tree."""
        if not self._sweeping:
            self._sweeping, self._cursor = self._dead, 1
        sweeping, masks, count = self._sweeping, self._masks, len(self._labels)
        while budget > 0 and self._cursor < count:
            node = self._cursor
            masks[node] &= ~sweeping
            self._cursor += 1
            budget -= 1
            while self._abandoned(node):
                parent = self._parents[node]
                self._remove(node)
                budget -= 1
                node = parent
        if self._cursor >= count:
            self._dead &= ~sweeping
            self._sweeping = 0
            if not self.nodes:
                self._reset()

    def _abandoned(self, node: int) -> bool:
        """A leaf without holders. (The root and vacant numbers have no label.)"""
        holders = self._masks[node] & ~self._sweeping
        return not holders and not self._child_counts[node] and bool(self._labels[node])
