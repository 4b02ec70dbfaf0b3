"""KV events of modelled engines, as the proxy receives them: losses, replays, state and index.

    BlockCache --rows--> KvFeed: a batch for each step --DELAY_SECS--> PublisherState --> BlockIndex

Batches are MessagePack as published by an engine, and are decoded by the proxy's own code; only
sockets and the separate process are left out. Prompts are token ids, equal if and only if blocks
are equal: a few ids for each block, padded with blanks, so that a body has a realistic length but
is read quickly. Invariant: the only randomness of a feed is that of `random`; no clock is read.
Source: note:real-engines 4 (vLLM publishes a batch per step and keeps 10,000 for replays).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Final, NamedTuple, TypeVar

import msgspec

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.kv_events.publisher_state import PublisherState
from omni_proxy.routing.policies.cache_cost import BYTES_PER_TOKEN
from omni_proxy.simulate.virtual_time import VirtualTime
from omni_proxy.simulate.workload import Request

DELAY_SECS: Final = 0.002  # from an engine to the proxy's index, or from the proxy to an engine
REPLAYED_BATCHES: Final = 10_000  # the newest ones; older ones can't be replayed
_WORD: Final = (1 << 64) - 1
# Every block is written as this many tokens: the hex digits of its 64-bit id, each a token id of
# three digits, which takes 4 bytes in a body and one byte in MessagePack. The factor makes
# consecutive block ids differ in their first digits, as texts do.
BLOCK_IDS: Final = 16
_FACTOR: Final = 0x9E3779B97F4A7C15  # odd, so that no two products are equal
_AS_JSON: Final = str.maketrans({f"{digit:x}": f"{100 + digit}," for digit in range(16)})
_AS_MSGPACK: Final = bytes.maketrans(b"0123456789abcdef", bytes(range(100, 116)))

T = TypeVar("T")
_encode: Final = msgspec.msgpack.Encoder().encode


def reads_events(routing: RoutingConfig) -> bool:
    """Whether picks with this configuration can depend on KV events."""
    return routing.policy == "cache_aware" and routing.cache_aware.source == "events"


class StoredRow(NamedTuple):
    """Consecutive blocks that an engine has computed. `parent`: the block before them, None at the
    start of a prompt."""

    blocks: list[int]
    parent: int | None


class Loss(NamedTuple):
    """Batches that never arrive. `share` from 0 to 1."""

    share: float
    random: Random


class _Batch(NamedTuple):
    """In `rows`, a list has removed blocks, None means that all were removed."""

    number: int
    at: float
    rows: list[StoredRow | list[int] | None]


class KvFeed:
    """One engine's publisher, and the proxy's subscription. `replays`: it has a replay socket."""

    def __init__(
        self, url: str, time: VirtualTime, index: BlockIndex, loss: Loss, *, replays: bool
    ) -> None:
        self.state = PublisherState(replays=replays)
        self.lost = 0  # number of lost batches
        self._url = url
        self._time = time
        self._index = index
        self._loss = loss
        self._rows: list[StoredRow | list[int] | None] = []
        self._kept: deque[_Batch] = deque(maxlen=REPLAYED_BATCHES if replays else 0)
        self._next = 0
        self._alive = True
        self.state.connected(time.now)
        self._hand_over()

    # Called by the engine.

    def stored(self, request: Request, place: int) -> None:
        """A block of the prompt is computed. A partial last block is published, too, unless it is
        very short: engines publish most of it, because their blocks are smaller."""
        if request.block_size(place) >= BLOCK_IDS:
            block, parent = request.blocks[place], request.blocks[place - 1] if place else None
            last = self._rows[-1] if self._rows else None
            if isinstance(last, StoredRow) and last.blocks[-1] == parent:
                last.blocks.append(block)
            else:
                self._rows.append(StoredRow([block], parent))

    def removed(self, block: int) -> None:
        if self._rows and isinstance(self._rows[-1], list):
            self._rows[-1].append(block)
        else:
            self._rows.append([block])

    def cleared(self) -> None:
        """The engine's cache is empty."""
        self._rows.append(None)

    def publish(self) -> None:
        """A step has ended: publish its changes as one batch."""
        if not self._rows:
            return
        batch = _Batch(self._next, self._time.now, self._rows)
        self._rows = []
        self._next += 1
        self._kept.append(batch)
        if self._loss.share and self._loss.random.random() < self._loss.share:
            self.lost += 1
            return
        self._schedule(self._receive, batch)

    def die(self) -> None:
        """The engine has ended, which closes the connection."""
        self._alive = False
        self._rows.clear()
        self._schedule(self._disconnected, None)

    # On the side of the proxy.

    def tick(self) -> None:
        self.state.tick(self._time.now)
        self._hand_over()

    def _schedule(self, call: Callable[[T], None], argument: T) -> None:
        self._time.schedule(self._time.now + DELAY_SECS, call, argument)

    def _receive(self, batch: _Batch) -> None:
        self.state.receive(batch.number, _payload(batch), self._time.now)
        self._hand_over()

    def _disconnected(self, _: None) -> None:
        self.state.disconnected()
        self._hand_over()

    def _hand_over(self) -> None:
        """Apply changes to the index, and send a replay request to the engine."""
        if changes := self.state.take_changes():
            self._index.apply(self._url, changes)
        if self.state.replay_from is not None:
            start, self.state.replay_from = self.state.replay_from, None
            self._schedule(self._start_replay, start)

    def _start_replay(self, start: int) -> None:
        """A replay request arrives at the engine. Replays are never lost."""
        if self._alive:
            self._schedule(self._replayed, [batch for batch in self._kept if batch.number >= start])

    def _replayed(self, batches: list[_Batch]) -> None:
        if not self.state.is_replaying:
            return
        for batch in batches:
            self.state.replayed(batch.number, _payload(batch), self._time.now)
        self.state.replay_ended(self._time.now)
        self._hand_over()


def token_prompt(request: Request, number: int) -> bytes:
    """The prompt as a JSON list of ids. `number` makes a prompt without blocks unique."""
    width = request.block_tokens * BYTES_PER_TOKEN
    blocks = request.blocks or (_WORD - number,) * (
        -(-request.input_tokens // request.block_tokens)
    )
    text = b"".join(_encoded_block(block)[0].ljust(width)[:width] for block in blocks)
    return b"[%b]" % text[: request.input_tokens * BYTES_PER_TOKEN].rstrip(b", ")


@lru_cache(1 << 16)
def _encoded_block(block: int) -> tuple[bytes, bytes]:
    """The tokens of a block: as JSON with a comma after each, and as MessagePack."""
    digits = f"{block * _FACTOR & _WORD:0{BLOCK_IDS}x}"
    return digits.translate(_AS_JSON).encode(), digits.encode().translate(_AS_MSGPACK)


def _payload(batch: _Batch) -> bytes:
    return _encode([batch.at, [_event(row) for row in batch.rows]])


def _event(row: StoredRow | list[int] | None) -> list[object]:
    if row is None:
        return ["AllBlocksCleared"]
    if isinstance(row, list):
        return ["BlockRemoved", [block & _WORD for block in row], "GPU"]
    ids = b"".join(_encoded_block(block)[1] for block in row.blocks)
    tokens = msgspec.Raw(b"\xdd" + len(ids).to_bytes(4, "big") + ids)  # one byte per id
    names = [block & _WORD for block in row.blocks]
    parent = None if row.parent is None else row.parent & _WORD
    return ["BlockStored", names, parent, tokens, BLOCK_IDS, None, "GPU"]
