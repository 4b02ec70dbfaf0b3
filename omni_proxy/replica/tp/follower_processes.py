"""The leader's handles of its followers: their processes, and the sockets to them.

    start ──all ready──> tell, tell, ...   listen: what they say comes by `post`   ──> close
Invariant: after `close` no follower is left. One that exits or reports its end is lost for good;
the reason is in `lost` before any later message of it is handled.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from omni_proxy.replica.pipeline.hosting.frames import (
    FrameDecoder,
    FrameError,
    ProcessStart,
    StageCall,
    ToStage,
    encode_frame,
)
from omni_proxy.replica.pipeline.hosting.stage_process import command
from omni_proxy.replica.pipeline.messages import Admin, StageEnded, StageReady
from omni_proxy.replica.tp.group import FollowerMessage, RankLost, RankMessage

READY_SECS = 300.0  # for a follower to load its part
EXIT_SECS = 2.0  # from the end of its socket to SIGKILL
READ_BYTES = 1 << 18

Post = Callable[[RankMessage | RankLost], None]

_decoder: msgspec.msgpack.Decoder[FollowerMessage] = msgspec.msgpack.Decoder(FollowerMessage)


class Follower:
    """One follower's process; the end of either end of its socket ends the follower."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._connection, theirs = socket.socketpair()
        self._frames = FrameDecoder()
        with theirs:
            self._process = subprocess.Popen(
                command(theirs.fileno()), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
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

    def heard(self, until: float | None = None) -> list[FollowerMessage]:
        """What the next read brings; raises OSError, FrameError, msgspec.DecodeError."""
        left = None if until is None else max(0.001, until - time.monotonic())
        self._connection.settimeout(left)
        data = self._connection.recv(READ_BYTES)
        self._connection.settimeout(None)
        if not data:
            raise ConnectionResetError("it closed its connection")
        return [_decoder.decode(body) for body in self._frames.feed(data)]

    def hang_up(self) -> None:
        """Closes the connection; the shutdown also wakes this side's reader."""
        with suppress(OSError):  # it was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def end(self) -> None:
        try:
            self._process.wait(EXIT_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


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
        for rank, each in enumerate(params, 1):
            self._members.append(Follower(rank))
            self._members[-1].begin(StageCall(self._stage, factory, each))

    def await_ready(self) -> None:
        """Wait until all have loaded their part; raises RankLost with the reason of one."""
        until = time.monotonic() + READY_SECS
        for member in self._members:
            try:
                while not any(isinstance(each, StageReady) for each in self._next(member, until)):
                    pass
            except (OSError, FrameError, msgspec.DecodeError) as error:
                raise self.lose(member.rank, str(error)) from error

    def _next(self, member: Follower, until: float | None = None) -> list[FollowerMessage]:
        heard = member.heard(until)
        for each in heard:
            if isinstance(each, StageEnded):
                raise ConnectionAbortedError(each.error or "it ended unasked")
        return heard

    def lose(self, rank: int, reason: str) -> RankLost:
        """Note that nothing can be computed any more; returns what to raise."""
        if not self.lost:
            self.lost = f"rank {rank} of stage {self._stage} is lost: {reason}"
        return RankLost(self.lost)

    def listen(self, post: Post) -> None:
        for member in self._members:
            threading.Thread(
                target=self._hear,
                args=(member, post),
                name=f"{self._stage}-rank-{member.rank}",
                daemon=True,
            ).start()

    def _hear(self, member: Follower, post: Post) -> None:
        try:
            while True:
                for message in self._next(member):
                    post(RankMessage(member.rank, message))
        except (OSError, FrameError, msgspec.DecodeError) as error:
            if not self._closed:
                post(self.lose(member.rank, str(error)))

    def tell(self, message: Admin) -> None:
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
            member.hang_up()
        for member in self._members:
            member.end()
