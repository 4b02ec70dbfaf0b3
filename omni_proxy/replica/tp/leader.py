"""Rank 0: the text stage's scheduler over a sharded model, and the processes of its followers.

Invariant: if a batch that was sent to the followers cannot be finished, the stage ends: all ranks
end, the requests fail, and the pipeline's runtime restarts the stage with its initial weights. An
operation ends when every rank has replied; while it halts one of them, no batch is computed. After
`Followers.close`, no follower process is left. A follower that exits or reports its end is lost;
`lost` is set to the reason before any later message is handled.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, cast

import msgspec
from torch import Tensor

from omni_proxy.replica.models.kv import SequenceKV
from omni_proxy.replica.models.llama import Batch, BatchPart, Llama
from omni_proxy.replica.models.shard import Shard
from omni_proxy.replica.models.text_model import TextModel
from omni_proxy.replica.pipeline.stage_messages import (
    Admin,
    AdminResult,
    Emit,
    StageEnded,
    StageInput,
    StageOutput,
    StageReady,
)
from omni_proxy.replica.pipeline.stage_process import (
    FrameDecoder,
    FrameError,
    ProcessStart,
    StageCall,
    ToStage,
    command,
    encode_frame,
)
from omni_proxy.replica.text.json_schema import CompiledConstraint
from omni_proxy.replica.text.operations import StepDone
from omni_proxy.replica.text.scheduler import TextScheduler
from omni_proxy.replica.tp.group import (
    FollowerMessage,
    RankGroup,
    RankLost,
    RankMessage,
    StepOverdue,
    step,
)
from omni_proxy.replica.tp.rank_fanout import RankFanOut
from omni_proxy.replica.tp.sharded_model import KVJournal, MirroredKV, RankWorker, ShardedLlama
from omni_proxy.shared.child_process import wait_or_kill_in_thread

READY_SECS = 300.0  # for a follower to load its part
READ_BYTES = 1 << 18

Post = Callable[[RankMessage | RankLost], None]

_decoder: msgspec.msgpack.Decoder[FollowerMessage] = msgspec.msgpack.Decoder(FollowerMessage)
LeaderMessage = StepDone | CompiledConstraint | RankMessage | StepOverdue | RankLost


class Follower:
    """One follower's process, which ends when either end of its socket is closed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._connection, child_end = socket.socketpair()
        self._frames = FrameDecoder()
        with child_end:
            self._process = subprocess.Popen(
                command(child_end.fileno()), stdin=subprocess.DEVNULL, pass_fds=[child_end.fileno()]
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, call: StageCall) -> None:
        self.send(
            encode_frame(ProcessStart([call], sys.path, logging.getLogger().getEffectiveLevel()))
        )

    def send(self, frame: bytes) -> None:
        self._connection.sendall(frame)

    def receive(self, until: float | None = None) -> list[FollowerMessage]:
        """Read once and return the complete messages; raises OSError, FrameError, DecodeError."""
        left = None if until is None else max(0.001, until - time.monotonic())
        self._connection.settimeout(left)
        data = self._connection.recv(READ_BYTES)
        self._connection.settimeout(None)
        if not data:
            raise ConnectionResetError("it closed its connection")
        return [_decoder.decode(body) for body in self._frames.feed(data)]

    def close_connection(self) -> None:
        """Closes the connection; the shutdown also wakes this side's reader."""
        with suppress(OSError):  # the follower has already closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def end(self) -> None:
        wait_or_kill_in_thread(self._process)


class Followers:
    """Ranks 1 and up of one stage. `lost` may be read by any thread."""

    def __init__(self, stage: str) -> None:
        self.lost = ""
        self._stage = stage
        self._members: list[Follower] = []
        self._closed = False

    @property
    def ranks(self) -> list[int]:
        return [member.rank for member in self._members]

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    def start(self, factory: str, params: Iterable[dict[str, Any]]) -> None:
        """Start one process for each element of `params`; the first is rank 1."""
        for rank, rank_params in enumerate(params, 1):
            self._members.append(Follower(rank))
            self._members[-1].begin(StageCall(self._stage, factory, rank_params))

    def await_ready(self) -> None:
        """Wait until all have loaded their part; raises RankLost if one fails to."""
        until = time.monotonic() + READY_SECS
        for member in self._members:
            try:
                while not any(
                    isinstance(message, StageReady) for message in self._next(member, until)
                ):
                    pass
            except (OSError, FrameError, msgspec.DecodeError) as error:
                raise self.lose(member.rank, str(error)) from error

    def _next(self, member: Follower, until: float | None = None) -> list[FollowerMessage]:
        received = member.receive(until)
        for message in received:
            if isinstance(message, StageEnded):
                raise ConnectionAbortedError(message.error or "it ended unexpectedly")
        return received

    def lose(self, rank: int, reason: str) -> RankLost:
        """Record that no batch can be computed any more; returns the error to raise."""
        if not self.lost:
            self.lost = f"rank {rank} of stage {self._stage} is lost: {reason}"
        return RankLost(self.lost)

    def listen(self, post: Post) -> None:
        for member in self._members:
            threading.Thread(
                target=self._read,
                args=(member, post),
                name=f"{self._stage}-rank-{member.rank}",
                daemon=True,
            ).start()

    def _read(self, member: Follower, post: Post) -> None:
        try:
            while True:
                for message in self._next(member):
                    post(RankMessage(member.rank, message))
        except (OSError, FrameError, msgspec.DecodeError) as error:
            if not self._closed:
                post(self.lose(member.rank, str(error)))

    def send_all(self, message: Admin) -> None:
        """Send to all; raises RankLost."""
        if self.lost:
            raise RankLost(self.lost)
        frame = encode_frame(ToStage(self._stage, message))
        for member in self._members:
            try:
                member.send(frame)
            except OSError as error:
                raise self.lose(member.rank, str(error)) from error

    def close(self) -> None:
        self._closed = True
        for member in self._members:
            member.close_connection()
        for member in self._members:
            member.end()


class LeaderLlama(ShardedLlama):
    """Sends every batch to the followers before it computes its own part."""

    def __init__(self, whole: Llama, shard: Shard, group: RankGroup, followers: Followers) -> None:
        super().__init__(whole, shard, group.add_up)
        self._followers = followers
        self._journal = KVJournal()
        self._announced = False

    def new_kv(self) -> SequenceKV:
        return MirroredKV(self.kv_shape, self.model.embed_tokens.weight.data, self._journal)

    def forward(self, parts: Sequence[BatchPart], *, all_positions: bool = False) -> Tensor:
        with self._in_step():
            return super().forward(parts, all_positions=all_positions)

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        with self._in_step():
            return super().hidden(tokens)

    def _batch(self, parts: Sequence[BatchPart]) -> Batch:
        batch = super()._batch(parts)  # an invalid batch raises before it is sent to the followers
        forked = [(cast("MirroredKV", kv).number, list(tokens)) for tokens, kv in parts]
        self._announced = True
        self._followers.send_all(step(self._journal.take(), forked))
        return batch

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        self._announced = False
        try:
            yield
        except RankLost:
            raise
        except Exception as error:  # of any kind: the followers have already begun the step
            if not self._announced:
                raise
            reason = f"it failed in the middle of a step: {type(error).__name__}: {error}"
            raise self._followers.lose(0, reason) from error


class LeaderWorker(RankWorker):
    """Rank 0's worker, which owns the followers' processes."""

    def __init__(self, text: TextModel, group: RankGroup, followers: Followers) -> None:
        super().__init__(text, group)
        self.followers = followers

    @property
    def lost(self) -> str:
        """Why no batch can be computed any more, or ""."""
        return self.followers.lost or self.group.broken

    def close(self) -> None:
        """End the followers."""
        self.followers.close()
        self.group.close()


class LeaderScheduler(TextScheduler):
    """The stage's scheduler; `run` raises RankLost as soon as it detects that a rank is lost."""

    worker: LeaderWorker

    def __init__(self, stage_name: str, worker: LeaderWorker, *bounds: Any) -> None:
        super().__init__(stage_name, worker, *bounds)
        self._fan_out = RankFanOut(self, worker.followers.ranks)
        self._stage_emit: Emit = self.emit
        self.info |= {"tp_size": worker.tp_size, "follower_pids": worker.followers.pids}

    def run(self, inbox: SimpleQueue[StageInput], emit: Emit) -> None:
        self._stage_emit = emit
        try:
            self.worker.followers.listen(cast("Callable[[LeaderMessage], None]", inbox.put))
            super().run(inbox, self._emit_or_merge)
        finally:
            self.worker.close()

    def _emit_or_merge(self, message: StageOutput) -> None:
        """Emits every message except rank 0's results, which are merged into the stage's."""
        if isinstance(message, AdminResult):
            self._fan_out.own_result(message)
        else:
            self._stage_emit(message)

    @property
    def halted(self) -> bool:
        return super().halted or self._fan_out.halting

    def take(self, message: StageInput | LeaderMessage) -> None:
        match message:
            case Admin():
                self._fan_out.run(message, lambda: super(LeaderScheduler, self).take(message))
            case StepDone():
                self._fan_out.own_step(message)
            case RankMessage(rank, reported):
                self._fan_out.receive(rank, reported)
            case StepOverdue():
                self._fan_out.overdue(message)
            case RankLost():
                raise message
            case _:
                super().take(message)
        self._require_all_ranks()

    def step(self) -> None:
        super().step()
        self._require_all_ranks()

    def _require_all_ranks(self) -> None:
        if self.worker.lost:
            raise RankLost(self.worker.lost)

    # FanOutLeader

    def send_all(self, message: Admin) -> None:
        self.worker.followers.send_all(message)

    def schedule(self, message: StepOverdue, after_secs: float) -> Callable[[], None]:
        timer = threading.Timer(after_secs, self._post, (message,))
        timer.daemon = True
        timer.start()
        return timer.cancel

    def advance(self, done: StepDone) -> None:
        super().take(done)

    def damaged(self) -> None:
        self.weights_damaged()

    def send_result(self, result: AdminResult) -> None:
        self._stage_emit(result)
