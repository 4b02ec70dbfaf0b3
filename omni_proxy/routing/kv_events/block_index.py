"""The blocks that workers have cached, as their engines' events say: key to a set of holders.

One index serves all policies of a process; it is filled with the changes that `publisher_state`
makes, in their order. Each holder is a bit, so that sets of them are integers, as in
`prefix_tree`. Beside it stand predictions: prompts that were just sent to a worker, until their
events come, under the keys that were looked at when they were sent. Invariants: no call does more
work than its arguments are long, `maintain` a bounded slice; what a holder lost is never matched
again, even before its memory is free.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from omni_proxy.routing.kv_events.block_keys import PromptBlocks
from omni_proxy.routing.kv_events.held_changes import ChangeOp, HeldChange
from omni_proxy.routing.kv_events.known_texts import KnownTexts

# Parted by the lowest bits of the key, so that no growth of a table takes long.
_PARTS: Final = 256
_LOW: Final = _PARTS - 1
SWEPT_PER_SLICE: Final = 4096  # blocks, and at most one part more
PREDICTED_SECS: Final = 2.0  # a sent prompt counts as cached for so long without an event
MAX_PREDICTED = (
    1 << 25
)  # bytes of spelled prompts; older predictions go first; not final: tests set it
KEY_BYTES: Final = 36  # an integer of 64 bits


class PredictedPrompt(NamedTuple):
    """A prompt that was sent to `bit`."""

    bit: int
    until: float
    blocks: PromptBlocks


class BlockIndex:
    """Holders are URLs of workers, or of their data-parallel ranks. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self.texts = KnownTexts()  # whose blocks are known, wherever they are
        self.blocks = 0
        self.membership = 0  # changes with a holder's bit, trust or block size
        self._parts: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._sizes: dict[str, int] = {}  # tokens of a block, by holder
        self._counts: dict[str, int] = {}
        self._exact: set[str] = set()
        self._holed: set[str] = set()  # that may hold a block and not the one before it
        self._live = 0
        self._dead = 0  # forgotten, still on blocks
        self._sweeping = 0
        self._cursor = 0
        self._predicted: dict[int, PredictedPrompt] = {}
        self._predicted_before: dict[int, PredictedPrompt] = {}
        self._predicted_bytes = 0  # of the former
        self._turned_at = 0.0

    # What the events say.

    def apply(self, holder: str, changes: Iterable[HeldChange]) -> None:
        if self._dead:
            self._sweep()
        for op, values in changes:
            if op == ChangeOp.STORE:
                self._store(holder, values)
            elif op == ChangeOp.REMOVE:
                self._remove(holder, values)
            elif op == ChangeOp.RESET:
                self._reset(holder)
            elif op == ChangeOp.FORGET:
                self.forget(holder)
            else:
                self._note(op, holder, values)

    def _note(self, op: ChangeOp, holder: str, values: Sequence[int]) -> None:
        """What is to know of its blocks, beside their keys."""
        self.membership += 1
        if op == ChangeOp.BLOCK_SIZE:
            self._sizes[holder] = values[0]
        elif op == ChangeOp.EXACT:
            self._exact.add(holder)
            self._admit(holder)
        elif op == ChangeOp.INEXACT:
            self._exact.discard(holder)
        elif op == ChangeOp.HOLES:
            self._holed.add(holder)
        else:
            self._holed.discard(holder)

    def forget(self, holder: str) -> None:
        """It left the fleet."""
        self._reset(holder)
        self._exact.discard(holder)
        self._holed.discard(holder)
        self._sizes.pop(holder, None)
        self.membership += 1

    def clear(self, holder: str) -> None:
        """Its cache is empty: it was flushed."""
        self._reset(holder)

    def is_exact(self, holder: str) -> bool:
        """Whether what it does not hold here is not in its cache."""
        return holder in self._exact

    @property
    def has_exact(self) -> bool:
        return bool(self._exact)

    def block_size(self, holder: str) -> int:
        """In tokens; 0 while no block of it is known."""
        return self._sizes.get(holder, 0)

    def count(self, holder: str) -> int:
        """How many blocks it holds."""
        return self._counts.get(holder, 0)

    @property
    def bytes(self) -> int:
        """Of memory, about."""
        parts = sum(map(sys.getsizeof, self._parts))
        return parts + self.blocks * KEY_BYTES

    def mask_of(self, holders: Iterable[str]) -> int:
        mask = 0
        for holder in holders:
            mask |= self._bits.get(holder, 0)
        return mask

    def bit_of(self, holder: str) -> int:
        """0 while it holds nothing and is not exact."""
        return self._bits.get(holder, 0)

    # What policies ask.

    def match(self, prompt: PromptBlocks, among: int, now: float) -> tuple[int, int]:
        """How many leading blocks of a prompt some holder in the mask `among` has, and the mask of
        all that have so many; 0 and 0 if none has the first. Changes nothing.

        Who has a block has all before it, but for holders with holes, so few blocks are looked at.
        """
        among &= self._live
        depth, held = self._match_stored(prompt, among)
        if not self._predicted and not self._predicted_before:
            return depth, held
        for guess in self._guesses(prompt, now):
            if not guess.bit & among:
                continue
            guessed = prompt.common(guess.blocks)
            if guessed > depth:
                depth, held = guessed, guess.bit
            elif guessed == depth and depth:
                held |= guess.bit
        return depth, held

    def _match_stored(self, prompt: PromptBlocks, among: int) -> tuple[int, int]:
        if not self._holed:
            return self._match_ends(prompt, among)
        holed = self.mask_of(self._holed) & among
        depth, held = self._match_ends(prompt, among & ~holed)
        depth_each, held_each = self._match_each(prompt, holed)
        if depth_each == depth:
            return depth, held | held_each
        return max((depth, held), (depth_each, held_each))

    def _match_ends(self, prompt: PromptBlocks, among: int) -> tuple[int, int]:
        high, parts, key_of = prompt.count, self._parts, prompt.key
        if not high:
            return 0, 0
        key = key_of(1)
        held = parts[key & _LOW].get(key, 0) & among
        if not held:
            return 0, 0
        depth, at = 1, high  # most prompts are known whole, or nearly so
        while depth < high:
            key = key_of(at, depth)
            mask = parts[key & _LOW].get(key, 0) & among
            if mask:
                depth, held = at, mask
            else:
                high = at - 1
            at = (depth + high + 1) >> 1
        return depth, held

    def _match_each(self, prompt: PromptBlocks, among: int) -> tuple[int, int]:
        depth = held = 0
        if among:
            for key in prompt.each_key():
                among &= self._parts[key & _LOW].get(key, 0)
                if not among:
                    break
                held = among
                depth += 1
        return depth, held

    def _guesses(self, prompt: PromptBlocks, now: float) -> Iterator[PredictedPrompt]:
        """Prompts that were sent and have a block of this one, each once."""
        if prompt.count:
            prompt.last_key()  # by which an equal prompt is found
        seen: list[PredictedPrompt] = []
        for predicted in (self._predicted, self._predicted_before):
            for key in predicted.keys() & prompt.asked:
                guess = predicted[key]
                if guess.until > now and guess not in seen:
                    seen.append(guess)
                    yield guess

    def depths(self, prompt: PromptBlocks, among: int, now: float) -> dict[str, int]:
        """How many leading blocks each holder in the mask has, those with none left out."""
        lengths: dict[str, int] = {}
        while True:
            depth, held = self.match(prompt, among, now)
            if not depth:
                return lengths
            lengths.update(dict.fromkeys(self.named(held), depth))
            among &= ~held

    def named(self, mask: int) -> list[str]:
        names = []
        while mask:
            bit = mask & -mask
            names.append(self._names[bit])
            mask ^= bit
        return names

    def predict(self, holder: str, prompt: PromptBlocks, now: float) -> None:
        """This prompt was sent to it: until its events come, it counts as cached there."""
        self._turn(now)
        bit, parts = self._admit(holder), self._parts
        if not prompt.count:
            return
        prompt.key(1)  # by which a prompt with the same beginning is found
        prompt.last_key()
        new = [key for key in prompt.asked if not parts[key & _LOW].get(key, 0) & bit]
        if new:
            guess = PredictedPrompt(bit, now + PREDICTED_SECS, prompt)
            self._predicted.update(dict.fromkeys(new, guess))
            self._predicted_bytes += prompt.memory

    def maintain(self, now: float) -> bool:
        """One slice of upkeep; whether more is to do."""
        self._turn(now)
        self.texts.maintain(now)
        if self._dead:
            self._sweep()
        return bool(self._dead)

    def _predictions(self) -> list[dict[int, PredictedPrompt]]:
        return [each for each in (self._predicted, self._predicted_before) if each]

    def _turn(self, now: float) -> None:
        """Predictions go by whole tables: one by one they would cost as much again."""
        if now - self._turned_at >= PREDICTED_SECS or self._predicted_bytes > MAX_PREDICTED // 2:
            self._predicted_before, self._predicted = self._predicted, {}
            self._predicted_bytes = 0
            self._turned_at = now

    def _store(self, holder: str, keys: Iterable[int]) -> None:
        bit, parts, new, more = self._admit(holder), self._parts, 0, 0
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

    def _reset(self, holder: str) -> None:
        """It holds nothing from now on, predictions included; memory is freed in slices."""
        bit = self._bits.pop(holder, 0)
        if not bit:
            return
        del self._names[bit]
        self._counts.pop(holder, None)
        self._live &= ~bit
        self._dead |= bit
        self.membership += 1
        if holder in self._exact:
            self._admit(holder)

    def _admit(self, holder: str) -> int:
        bit = self._bits.get(holder, 0)
        if not bit:
            used = self._live | self._dead
            bit = ~used & (used + 1)  # the lowest that is free
            self._bits[holder] = bit
            self._names[bit] = holder
            self._live |= bit
            self.membership += 1
        return bit

    def _sweep(self) -> None:
        """Take forgotten bits off the blocks of some parts."""
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
        """A bit that is given to another holder must not bring predictions with it."""
        if any(not guess.bit & keep for guess in chain(*map(dict.values, self._predictions()))):
            self._predicted = {k: v for k, v in self._predicted.items() if v.bit & keep}
            self._predicted_before = {
                k: v for k, v in self._predicted_before.items() if v.bit & keep
            }
