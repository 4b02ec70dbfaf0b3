"""Index of the blocks that workers have cached, from their engines' events: key to set of holders.

One index serves all policies of a process; it applies the changes that `publisher_state` makes, in
order. Each holder is a bit, so that sets of them are integers, as in `prefix_tree`. In addition
there are predictions: prompts that were just sent to a worker count as cached until their events
arrive; they are found by the keys that were computed when they were sent. Invariants: a call takes
time linear in its arguments, `maintain` does a bounded slice; blocks that a holder lost are never
matched again, even before their memory is freed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from omni_proxy.routing.holder_bits import lowest_free_bit, mask_of
from omni_proxy.routing.kv_events.block_keys import PromptBlocks
from omni_proxy.routing.kv_events.engine_blocks import ChangeOp, HeldChange
from omni_proxy.routing.kv_events.tokenized_texts import TokenizedTexts

# Tables by the lowest bits of the key, so that growing one never takes long.
_PARTS: Final = 256
_LOW: Final = _PARTS - 1
SWEPT_PER_SLICE: Final = 4096  # blocks; the last part of a slice may exceed it
PREDICTED_SECS: Final = 2.0  # how long a sent prompt counts as cached without an event
# Bytes of predicted prompts; above it older predictions are dropped. Not Final: tests set it.
MAX_PREDICTED = 1 << 25
KEY_BYTES: Final = 36  # memory of a 64-bit integer


class PredictedPrompt(NamedTuple):
    """A prompt that was sent to `bit`."""

    bit: int
    until: float
    blocks: PromptBlocks


class BlockIndex:
    """Holders are URLs of workers, or of their data-parallel ranks. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self.texts = TokenizedTexts()  # texts with known blocks, for all holders
        self.blocks = 0
        self.generation = 0  # changes with any holder's bit, exactness or block size
        self._parts: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._sizes: dict[str, int] = {}  # tokens of a block, by holder
        self._counts: dict[str, int] = {}
        self._exact: set[str] = set()
        self._holed: set[str] = set()  # may hold a block without the one before it
        self._live = 0
        self._dead = 0  # bits of removed holders that are still on blocks
        self._sweeping = 0
        self._cursor = 0
        self._predicted: dict[int, PredictedPrompt] = {}
        self._predicted_before: dict[int, PredictedPrompt] = {}
        self._predicted_bytes = 0  # of `_predicted`
        self._rotated_at = 0.0

    # Changes by events.

    def apply(self, holder: str, changes: Iterable[HeldChange]) -> None:
        if self._dead:
            self._sweep()
        for op, values in changes:
            if op == ChangeOp.STORE:
                self._store(holder, values)
            elif op == ChangeOp.REMOVE:
                self._remove(holder, values)
            elif op == ChangeOp.RESET:
                self.clear(holder)
            elif op == ChangeOp.FORGET:
                self.forget(holder)
            else:
                self._apply_attribute(op, holder, values)

    def _apply_attribute(self, op: ChangeOp, holder: str, values: Sequence[int]) -> None:
        """Apply a change of the holder's attributes."""
        self.generation += 1
        if op == ChangeOp.BLOCK_SIZE:
            self._sizes[holder] = values[0]
        elif op == ChangeOp.EXACT:
            self._exact.add(holder)
            self._allocate_bit(holder)
        elif op == ChangeOp.INEXACT:
            self._exact.discard(holder)
        elif op == ChangeOp.HOLES:
            self._holed.add(holder)
        else:
            self._holed.discard(holder)

    def forget(self, holder: str) -> None:
        """The holder left the fleet."""
        self.clear(holder)
        self._exact.discard(holder)
        self._holed.discard(holder)
        self._sizes.pop(holder, None)
        self.generation += 1

    def clear(self, holder: str) -> None:
        """Remove the holder's blocks and predictions; memory is freed in slices."""
        bit = self._bits.pop(holder, 0)
        if not bit:
            return
        del self._names[bit]
        self._counts.pop(holder, None)
        self._live &= ~bit
        self._dead |= bit
        self.generation += 1
        if holder in self._exact:
            self._allocate_bit(holder)

    def is_exact(self, holder: str) -> bool:
        """Whether blocks that the index doesn't have for the holder are not in its cache."""
        return holder in self._exact

    @property
    def has_exact(self) -> bool:
        return bool(self._exact)

    def block_size(self, holder: str) -> int:
        """In tokens; 0 while no block of the holder is known."""
        return self._sizes.get(holder, 0)

    def count(self, holder: str) -> int:
        """How many blocks the holder has."""
        return self._counts.get(holder, 0)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory."""
        parts = sum(map(sys.getsizeof, self._parts))
        return parts + self.blocks * KEY_BYTES

    def mask_of(self, holders: Iterable[str]) -> int:
        return mask_of(self._bits, holders)

    def bit_of(self, holder: str) -> int:
        """0 while the holder has no blocks and is not exact."""
        return self._bits.get(holder, 0)

    # Queries by policies.

    def match(self, prompt: PromptBlocks, among: int, now: float) -> tuple[int, int]:
        """The most leading blocks of a prompt that a holder in the mask `among` has, and the mask
        of all holders with as many; 0 and 0 if none has the first block. Changes nothing.

        A holder of a block has all blocks before it, except for holders with holes. So a binary
        search looks up only a few blocks.
        """
        among &= self._live
        depth, holders = self._match_stored(prompt, among)
        if not self._predicted and not self._predicted_before:
            return depth, holders
        for prediction in self._matching_predictions(prompt, now):
            if not prediction.bit & among:
                continue
            predicted_depth = prompt.common(prediction.blocks)
            if predicted_depth > depth:
                depth, holders = predicted_depth, prediction.bit
            elif predicted_depth == depth and depth:
                holders |= prediction.bit
        return depth, holders

    def _match_stored(self, prompt: PromptBlocks, among: int) -> tuple[int, int]:
        if not self._holed:
            return self._match_by_bisection(prompt, among)
        holed = self.mask_of(self._holed) & among
        depth, holders = self._match_by_bisection(prompt, among & ~holed)
        linear_depth, linear_holders = self._match_linear(prompt, holed)
        if linear_depth == depth:
            return depth, holders | linear_holders
        return max((depth, holders), (linear_depth, linear_holders))

    def _match_by_bisection(self, prompt: PromptBlocks, among: int) -> tuple[int, int]:
        high, parts, key_of = prompt.count, self._parts, prompt.key
        if not high:
            return 0, 0
        key = key_of(1)
        holders = parts[key & _LOW].get(key, 0) & among
        if not holders:
            return 0, 0
        depth, probe = 1, high  # start at the end: most prompts are cached almost completely
        while depth < high:
            key = key_of(probe, depth)
            mask = parts[key & _LOW].get(key, 0) & among
            if mask:
                depth, holders = probe, mask
            else:
                high = probe - 1
            probe = (depth + high + 1) >> 1
        return depth, holders

    def _match_linear(self, prompt: PromptBlocks, among: int) -> tuple[int, int]:
        depth = holders = 0
        if among:
            for key in prompt.each_key():
                among &= self._parts[key & _LOW].get(key, 0)
                if not among:
                    break
                holders = among
                depth += 1
        return depth, holders

    def _matching_predictions(self, prompt: PromptBlocks, now: float) -> Iterator[PredictedPrompt]:
        """Predicted prompts that share a block with this one, each once."""
        if prompt.count:
            prompt.last_key()  # computed so that an equal prompt is found by it
        seen: list[PredictedPrompt] = []
        for predicted in (self._predicted, self._predicted_before):
            for key in predicted.keys() & prompt.computed_keys:
                prediction = predicted[key]
                if prediction.until > now and prediction not in seen:
                    seen.append(prediction)
                    yield prediction

    def depths(self, prompt: PromptBlocks, among: int, now: float) -> dict[str, int]:
        """Number of leading blocks by holder in the mask, for holders that have any."""
        lengths: dict[str, int] = {}
        while True:
            depth, mask = self.match(prompt, among, now)
            if not depth:
                return lengths
            lengths.update(dict.fromkeys(self.holders_of(mask), depth))
            among &= ~mask

    def holders_of(self, mask: int) -> list[str]:
        holders = []
        while mask:
            bit = mask & -mask
            holders.append(self._names[bit])
            mask ^= bit
        return holders

    def predict(self, holder: str, prompt: PromptBlocks, now: float) -> None:
        """The prompt was sent to the holder: until its events arrive, it counts as cached there."""
        self._rotate_predictions(now)
        bit, parts = self._allocate_bit(holder), self._parts
        if not prompt.count:
            return
        prompt.key(1)  # computed so that prompts with the same prefix are found by it
        prompt.last_key()
        new = [key for key in prompt.computed_keys if not parts[key & _LOW].get(key, 0) & bit]
        if new:
            prediction = PredictedPrompt(bit, now + PREDICTED_SECS, prompt)
            self._predicted.update(dict.fromkeys(new, prediction))
            self._predicted_bytes += prompt.memory

    def maintain(self, now: float) -> bool:
        """Do one slice of upkeep; returns whether more is left."""
        self._rotate_predictions(now)
        self.texts.maintain(now)
        if self._dead:
            self._sweep()
        return bool(self._dead)

    def _prediction_tables(self) -> list[dict[int, PredictedPrompt]]:
        return [table for table in (self._predicted, self._predicted_before) if table]

    def _rotate_predictions(self, now: float) -> None:
        """Drop expired predictions a table at a time: one by one it would cost twice as much."""
        if now - self._rotated_at >= PREDICTED_SECS or self._predicted_bytes > MAX_PREDICTED // 2:
            self._predicted_before, self._predicted = self._predicted, {}
            self._predicted_bytes = 0
            self._rotated_at = now

    def _store(self, holder: str, keys: Iterable[int]) -> None:
        bit, parts, new, more = self._allocate_bit(holder), self._parts, 0, 0
        live = self._live
        for key in keys:
            part = parts[key & _LOW]
            mask = part.get(key)
            if mask is None:
                part[key] = bit
                new += 1
                more += 1
            elif not mask & bit:
                part[key] = mask & live | bit
                more += 1
        self.blocks += new
        self._counts[holder] = self._counts.get(holder, 0) + more

    def _remove(self, holder: str, keys: Iterable[int]) -> None:
        bit, parts, gone, less = self._bits.get(holder, 0), self._parts, 0, 0
        live = self._live
        for key in keys:
            part = parts[key & _LOW]
            mask = part.get(key, 0)
            if not mask & bit:
                continue
            less += 1
            mask = mask & live & ~bit
            if mask:
                part[key] = mask
            else:
                del part[key]
                gone += 1
        self.blocks -= gone
        if less:
            self._counts[holder] -= less

    def _allocate_bit(self, holder: str) -> int:
        """The bit of the holder, allocated if it has none."""
        bit = self._bits.get(holder, 0)
        if not bit:
            bit = lowest_free_bit(self._live | self._dead)
            self._bits[holder] = bit
            self._names[bit] = holder
            self._live |= bit
            self.generation += 1
        return bit

    def _sweep(self) -> None:
        """Remove dead bits from the blocks of some parts."""
        if not self._sweeping:
            self._sweeping, self._cursor = self._dead, 0
        keep = ~self._sweeping
        budget = SWEPT_PER_SLICE
        while budget > 0 and self._cursor < _PARTS:
            part = self._parts[self._cursor]
            kept = {key: mask & keep for key, mask in part.items() if mask & keep}
            self.blocks -= len(part) - len(kept)
            self._parts[self._cursor] = kept
            self._cursor += 1
            budget -= len(part)
        if self._cursor >= _PARTS:
            self._wipe_predictions(keep)
            self._dead &= ~self._sweeping
            self._sweeping = 0

    def _wipe_predictions(self, keep: int) -> None:
        """Remove predictions of dead bits, which may be reused for other holders."""
        if any(
            not prediction.bit & keep
            for prediction in chain(*map(dict.values, self._prediction_tables()))
        ):
            self._predicted = {k: v for k, v in self._predicted.items() if v.bit & keep}
            self._predicted_before = {
                k: v for k, v in self._predicted_before.items() if v.bit & keep
            }
