"""The state of one publisher of KV events: validates the order of its batches, tracks its blocks.

    unknown --batch 0, a cleared cache, or a replay from 0--> whole --a gap--> replay --> whole
       ^------ restarted, incomplete replay, undecodable event, two publishers -----------+

Invariants: while `mode` is "exact", `blocks` are the blocks that the engine had cached after the
last batch that arrived, as far as plain requests can use them. A batch that is missing, undecodable
or from another engine ends this mode before any later event is applied. After a broken connection
batch numbers do not prove continuity: the last batch must arrive again, byte for byte. Pure: the
caller supplies batches, times and changes of the connection, and requests replays (`replay_from`).
Sources: note:features 7 (trust), note:real-engines 4 (restart, flush, replay).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from omni_proxy.fleet.worker import KvMode
from omni_proxy.routing.kv_events.block_keys import extend_keys, root_key
from omni_proxy.routing.kv_events.engine_blocks import (
    MEDIA,
    ChangeOp,
    EngineBlocks,
    HeldChange,
    NameReused,
)
from omni_proxy.routing.kv_events.event_payload import (
    ClearedEvent,
    DecodedBatch,
    RemovedEvent,
    StoredEvent,
    UndecodablePayload,
    decode_batch,
)
from omni_proxy.shared.backoff import Backoff

MAX_HELD_BATCHES: Final = 10_000  # batches that arrive during a replay
MAX_HELD_BYTES: Final = 64 * 1024 * 1024
MAX_REPLAYS: Final = 3  # in a row, without a batch in order after them
FLUSH_SETTLE_SECS: Final = 5.0  # events this long after a flush may have been sent before it
RETRY_SECS: Final = 5.0  # after an unanswered replay request; doubles each time
MAX_RETRY_SECS: Final = 60.0
_DIGESTS: Final = 256  # kept of the last batches, to recognize duplicates


class _Replay:
    """A replay in progress. `start`: the first batch that was requested."""

    __slots__ = ("broken", "received", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.received = 0
        self.broken = ""


class PublisherState:
    """`replays`: whether the publisher has a replay socket. `now` is monotonic seconds.

    If `replay_from` is not None, the caller sends it to the replay socket, sets it to None, and
    passes the replies to `replayed`, `replay_ended` and `replay_failed`. Batches that are published
    during the replay still go to `receive`.
    """

    def __init__(self, *, replays: bool) -> None:
        self.mode: KvMode = "inferred"
        self.reason = "no batch was received from the publisher yet"
        self.replay_from: int | None = None
        self.batches = 0
        self.undecodable = 0
        self.undecodable_reason = ""
        self.blocks = EngineBlocks()
        self.block_size = 0
        self._replays = replays
        self._next = 0  # the number of the next batch
        self._newest_at = 0.0  # latest time in batches of this engine, by its clock
        self._order_at = 0.0  # the same, but only since the connection was last broken
        self._whole = False
        self._unproven = False  # the connection broke since the last batch
        self._replay: _Replay | None = None
        self._attempts = 0
        self._held: list[tuple[int, bytes]] = []
        self._held_bytes = 0
        self._digests: dict[int, int] = {}
        self._groups: set[int] = set()
        self._rank: int | None = None
        self._ignored_until = 0.0  # events before this time may have been sent before a flush
        self._has_holes = False  # as in the latest change
        self._clear_due = False  # after a flush: its event has not arrived
        self._retry_at: float | None = None
        self._backoff = Backoff(RETRY_SECS, MAX_RETRY_SECS)
        self._changes: list[HeldChange] = []

    @property
    def is_replaying(self) -> bool:
        """Whether a replay is expected; the caller drops replies that are not."""
        return self._replay is not None

    def take_changes(self) -> list[HeldChange]:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def dump(self) -> list[HeldChange]:
        """The whole state as changes; applying them again has no effect."""
        size = [HeldChange(ChangeOp.BLOCK_SIZE, [self.block_size])] if self.block_size else []
        mode = HeldChange(ChangeOp.EXACT if self.mode == "exact" else ChangeOp.INEXACT, [])
        holes = HeldChange(ChangeOp.HOLES if self.blocks.has_holes else ChangeOp.NO_HOLES, [])
        return [*size, holes, HeldChange(ChangeOp.STORE, self.blocks.keys()), mode]

    # Input.

    def connected(self, now: float) -> None:
        """Batches are received from now on. To be called once the subscription is certainly
        active."""
        if self._replay is None and self._replays:
            if self._unproven:
                self._begin_replay(max(0, self._next - 1))
            elif not self._whole:
                self._begin_replay(0)

    def disconnected(self) -> None:
        """Another engine may publish from now on, or batches may have been lost."""
        self._order_at = 0.0  # another engine's clock may differ
        if self._replay is not None:  # the held batches may be of another engine, too
            self._drop_replay("the connection to the publisher broke")
        if not self._whole:
            return
        if self._replays:
            self._unproven = True
            self._mark_degraded("the connection to the publisher broke")
        else:
            self._lose("the connection to the publisher broke")

    def receive(self, number: int, payload: bytes, now: float) -> None:
        """A published batch arrived."""
        self.batches += 1
        if self._replay is None and self._unproven:
            self._begin_replay(max(0, self._next - 1))
        if self._replay is None:
            self._take(number, payload, now)
            return
        self._held.append((number, payload))
        self._held_bytes += len(payload)
        if len(self._held) > MAX_HELD_BATCHES or self._held_bytes > MAX_HELD_BYTES:
            self.replay_failed("too many batches arrived during a replay", now)

    def tick(self, now: float) -> None:
        """To be called a few times a second: repeats an unanswered replay request."""
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            if self._replay is None and not self._whole:
                self._begin_replay(0)

    def flushed(self, now: float) -> None:
        """The engine's cache is empty now, because it confirmed a flush or was restarted: batches
        that it published before are void."""
        self._ignored_until = now + FLUSH_SETTLE_SECS
        if self._replay is not None:  # the held batches were published before
            self._next = max([self._next, *(number + 1 for number, _ in self._held)])
            self._drop_replay("the cache was cleared during a replay")
        self._clear_due = True
        self._clear_blocks()

    # Replays.

    def replayed(self, number: int, payload: bytes, now: float) -> None:
        """A replayed batch arrived."""
        replay = self._replay
        if replay is None or replay.broken:
            return
        if not replay.received and not replay.start:
            if number:
                replay.broken = f"the replay begins at batch {number}"
                return
            if 0 < self._newest_at < _time_of(payload):
                self._clear_due = False  # the flush was of an earlier engine
                self._ignored_until = 0.0
            self._forget()
        replay.received += 1
        if replay.received == 1 and replay.start:
            last = self._digests.get(number)
            if number == self._next - 1 and last == hash(payload):
                return
            if number != self._next or self._unproven:
                replay.broken = f"batch {self._next - 1} is no longer available for replay"
                return
        if number != self._next:
            replay.broken = f"batch {self._next} is missing in the replay"
            return
        self._apply(number, payload, now)

    def replay_ended(self, now: float) -> None:
        """The end mark of a replay arrived."""
        replay = self._replay
        if replay is None:
            return
        self._replay = None
        if replay.start and not replay.received:
            replay.broken = f"batch {self._next - 1} is no longer available for replay"
        if not replay.start and not replay.received and not replay.broken:
            self._forget()
        if replay.broken and replay.start and self._attempts < MAX_REPLAYS:
            self._begin_replay(0)
            return
        if replay.broken or self._clear_due:  # a replay may end before the flush
            self._lose(replay.broken or "the cache was cleared; its event has not arrived")
        elif self._whole:  # otherwise `_apply` has set the reason
            self._unproven = False
            self._mark_exact("replayed from the first batch" if not replay.start else "")
        self._take_held(now)
        if self._whole and self._replay is None:
            self._attempts = 0

    def replay_failed(self, reason: str, now: float) -> None:
        """The replay request got no reply, or an unreadable one."""
        if self._replay is None:
            return
        self._replay, self.replay_from = None, None
        self._lose(reason)
        self._retry_at = now + self._backoff.next_delay()
        self._take_held(now)

    def drop_oldest(self, count: int) -> None:
        """Remove the blocks that were stored first, because the index is full."""
        self._forget_blocks(list(islice(self.blocks, count)))

    # The order of batches.

    def _drop_replay(self, reason: str) -> None:
        self._replay, self.replay_from = None, None
        self._held, self._held_bytes = [], 0
        self._lose(reason)

    def _begin_replay(self, start: int) -> None:
        self._attempts += 1
        if self._attempts > MAX_REPLAYS:
            self._lose("batches were lost repeatedly")
            return
        self._replay = _Replay(start)
        self.replay_from = start
        self._mark_degraded(f"a replay from batch {start} on was requested")

    def _take_held(self, now: float) -> None:
        batches, self._held, self._held_bytes = self._held, [], 0
        for number, payload in batches:
            if self._replay is None:
                self._take(number, payload, now)
            else:
                self._held.append((number, payload))
                self._held_bytes += len(payload)

    def _take(self, number: int, payload: bytes, now: float) -> None:
        if self._digests.get(number) == hash(payload):
            return  # a duplicate
        if number > self._next and self._whole:
            lost = f"batches {self._next} to {number - 1} were lost"
            if self._replays and self._attempts < MAX_REPLAYS:
                self._begin_replay(max(0, self._next - 1))
                self._held.append((number, payload))
                self._held_bytes += len(payload)
                return
            self._lose(lost)
        elif (number < self._next or not number) and not self._restarted(number, payload, now):
            return
        self._apply(number, payload, now)
        if self.mode == "inferred":
            self.reason = "its first batches were not received"

    def _restarted(self, number: int, payload: bytes, now: float) -> bool:
        """Whether a batch with an earlier number is the next one to apply, of a new engine."""
        if _time_of(payload) < self._order_at:
            self._lose("batches arrived out of order")
            return False
        self._digests.clear()
        self._unproven = False
        if number:
            self._lose("the publisher restarted")
            if self._replays and self._attempts < MAX_REPLAYS:
                self._next = 0
                self._begin_replay(0)
                self._held.append((number, payload))
                self._held_bytes += len(payload)
                return False
            return True
        if now >= self._ignored_until:
            self._clear_due = False
        self._forget()
        self._mark_exact("received from the first batch on")
        return True

    # The content of batches.

    def _apply(self, number: int, payload: bytes, now: float) -> None:
        """Apply a batch that is in order, or that may clear the cache."""
        self._next = number + 1
        self._digests[number] = hash(payload)
        # Batches that arrived during a replay may also be part of it.
        most = _DIGESTS if self._replay is None else _DIGESTS + MAX_HELD_BATCHES
        while len(self._digests) > most:
            del self._digests[next(iter(self._digests))]
        try:
            batch = decode_batch(payload)
        except UndecodablePayload as error:
            self._not_understood(1, str(error))
            return
        # Consecutive numbers prove the order; the clock of an engine may be set back.
        is_late = batch.published_at < self._order_at and not self._whole
        self._newest_at = max(self._newest_at, batch.published_at)
        self._order_at = max(self._order_at, batch.published_at)
        if batch.undecodable:
            self._not_understood(len(batch.undecodable), batch.undecodable[0])
            return
        if self._is_of_another_rank(batch):
            self._lose("batches of several data-parallel ranks come from one publisher")
            return
        if self._clear_due and self._replay is None and now >= self._ignored_until:
            self._clear_due = False  # this engine does not publish its flushes
        self._take_events(batch, now, is_late=is_late)

    def _take_events(self, batch: DecodedBatch, now: float, *, is_late: bool) -> None:
        for event in batch.events:
            if isinstance(event, ClearedEvent):
                if not is_late:
                    self._cleared()
            elif not self._whole or now < self._ignored_until:
                continue
            elif isinstance(event, StoredEvent):
                self._store(event)
            else:
                self._remove(event)

    def _is_of_another_rank(self, batch: DecodedBatch) -> bool:
        if batch.rank is None:
            return False
        if self._rank is None:
            self._rank = batch.rank
        return batch.rank != self._rank

    def _not_understood(self, events: int, reason: str) -> None:
        self.undecodable += events
        self.undecodable_reason = reason
        self._lose(f"an event could not be decoded: {reason}")

    def _cleared(self) -> None:
        self._clear_blocks()
        self._whole = True
        if self._replay is None:  # a replayed event may be of an earlier flush
            self._ignored_until, self._clear_due = 0.0, False
            self._mark_exact("received since its cache was cleared")

    def _store(self, event: StoredEvent) -> None:
        if event.medium not in MEDIA or not event.plain:
            return
        if self.block_size != event.block_size and not self._set_block_size(event.block_size):
            return
        if event.group is not None:
            self._groups.add(event.group)
        before = root_key(event.block_size)
        if event.parent is not None:
            parent = self.blocks.key_of(event.parent)
            if parent is None:
                return  # after a block that plain requests can't use
            before = parent
        tokens = event.tokens[: event.plain * event.block_size]
        keys = extend_keys(before, tokens, event.block_size)
        try:
            new = self.blocks.store(event, keys)
        except NameReused:
            self._not_understood(1, "BlockStored: a hash was reused for other tokens")
            return
        if new:
            self._change(ChangeOp.STORE, new)
            self._note_holes()

    def _set_block_size(self, size: int) -> bool:
        if self.blocks:
            self._not_understood(1, "BlockStored: block_size has changed")
            return False
        self.block_size = size
        self._changes.append(HeldChange(ChangeOp.BLOCK_SIZE, [size]))
        return True

    def _remove(self, event: RemovedEvent) -> None:
        if event.medium not in MEDIA:
            return
        if event.group is not None and self._groups and event.group not in self._groups:
            return
        self._forget_blocks(self.blocks.leave_medium(event.hashes, event.medium))

    def _forget_blocks(self, names: Iterable[int]) -> None:
        keys = self.blocks.remove(names)
        if keys:
            if self.blocks.has_holes:  # must be applied before the blocks are removed
                self._note_holes()
            self._change(ChangeOp.REMOVE, keys)
            self._note_holes()

    def _note_holes(self) -> None:
        holes = self.blocks.has_holes
        if holes != self._has_holes:
            self._has_holes = holes
            self._changes.append(HeldChange(ChangeOp.HOLES if holes else ChangeOp.NO_HOLES, []))

    def _change(self, op: ChangeOp, keys: Sequence[int]) -> None:
        if self._changes and self._changes[-1].op is op:
            self._changes[-1].values.extend(keys)
        else:
            self._changes.append(HeldChange(op, list(keys)))

    # State transitions.

    def _clear_blocks(self) -> None:
        self.blocks.clear()
        self._note_holes()
        self._changes.append(HeldChange(ChangeOp.RESET, []))

    def _forget(self) -> None:
        """Reset the state: a new engine is followed from its first batch on."""
        self._clear_blocks()
        self._digests.clear()
        self._groups.clear()
        self._rank = None
        self._next, self._newest_at, self._order_at = 0, 0.0, 0.0
        self._whole = True

    def _mark_exact(self, reason: str) -> None:
        self._whole = True
        self._retry_at = None
        self._backoff.reset()
        if reason or self.mode != "exact":
            self.reason = reason or "the gap was filled by a replay"
        if self.mode != "exact":
            self.mode = "exact"
            self._changes.append(HeldChange(ChangeOp.EXACT, []))

    def _mark_degraded(self, reason: str) -> None:
        """Leave exact mode for now; the blocks are kept."""
        if self.mode == "exact":
            self.mode = "degraded"
            self._changes.append(HeldChange(ChangeOp.INEXACT, []))
        self.reason = reason

    def _lose(self, reason: str) -> None:
        """Leave exact mode and drop all blocks, because they can't be trusted any more."""
        self._mark_degraded(reason)
        if self._whole or self._next:
            self.mode = "degraded"
        self._whole = self._unproven = False
        if self.blocks:
            self._clear_blocks()


def _time_of(payload: bytes) -> float:
    try:
        return decode_batch(payload).published_at
    except UndecodablePayload:
        return 0.0
