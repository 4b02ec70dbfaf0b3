"""Runs stages in a child process, one process per configured `process` name.

Invariant: when `live` returns, also by cancellation, the child process is gone. Its end, for any
reason, is reported at once for each of its stages: it is detected by end of file on the socket.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

import msgspec
import trio

from omni_proxy.replica.pipeline.config import FlowError, StageConfig
from omni_proxy.replica.pipeline.hosting.frames import (
    FrameDecoder,
    FrameError,
    ProcessStart,
    StageCall,
    ToStage,
    encode_frame,
)
from omni_proxy.replica.pipeline.messages import Emit, Shutdown, StageEnded, StageInput, StageOutput
from omni_proxy.self_exec import program_argv

READ_BYTES = 1 << 18
EXIT_TIMEOUT_SECS = 2.0  # from closing its socket to SIGKILL

log = logging.getLogger(__name__)

_decoder: msgspec.msgpack.Decoder[StageOutput] = msgspec.msgpack.Decoder(StageOutput)


class StageProcess:
    """The stages that share the process called `name`."""

    def __init__(self, name: str, configs: Sequence[StageConfig]) -> None:
        self.name = name
        self.stages = tuple(config.name for config in configs)
        self.pid: int | None = None
        self._configs = configs
        self._outgoing: deque[bytes] = deque()
        self._has_outgoing = trio.Event()
        self._ended: dict[str, str] = {}
        self._has_run = False
        self._shutting_down = False

    def send(self, stage: str, message: StageInput) -> None:
        try:
            frame = encode_frame(ToStage(stage, message))
        except (TypeError, ValueError, OverflowError) as error:
            raise FlowError(f"what is meant for stage {stage} cannot be sent: {error}") from error
        self._outgoing.append(frame)
        self._has_outgoing.set()

    def shut(self) -> None:
        self._shutting_down = True
        for stage in self.stages:
            self.send(stage, Shutdown())

    async def live(self, post: Emit) -> None:
        self._ended = {}
        if self._has_run:
            self._outgoing.clear()  # messages for the previous run are obsolete
        self._has_run = True
        reason = f"process {self.name} was ended"
        try:
            reason = await self._run_once(post)
        except OSError as error:
            reason = f"process {self.name} could not start: {error.strerror or error}"
        finally:
            self.pid = None
            for stage in self.stages:
                if stage not in self._ended:
                    post(StageEnded(stage, reason))

    async def _run_once(self, post: Emit) -> str:
        ours, theirs = socket.socketpair()
        with theirs:
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            child = await trio.lowlevel.open_process(
                command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment(),
            )
        self.pid = child.pid
        self._outgoing.appendleft(encode_frame(self._start_message()))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream)
                await self._read(stream, post)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()
                await _wait_or_kill(child)
        return f"process {self.name} {_describe_exit(child.returncode)}"

    async def _read(self, stream: trio.SocketStream, post: Emit) -> None:
        frames = FrameDecoder()
        while data := await _receive(stream):
            try:
                for body in frames.feed(data):
                    message = _decoder.decode(body)
                    if isinstance(message, StageEnded):
                        self._ended[message.stage] = message.error
                    post(message)
            except (FrameError, msgspec.DecodeError) as error:
                log.error("invalid_frame process=%s error=%s", self.name, error)
                return
            # If one stage ends unexpectedly, all stages of the process restart together.
            if len(self._ended) == len(self.stages) or (self._ended and not self._shutting_down):
                return

    async def _write(self, stream: trio.SocketStream) -> None:
        while True:
            while self._outgoing:
                try:
                    await stream.send_all(self._outgoing.popleft())
                except trio.BrokenResourceError:
                    return  # the reading task sees end of file
            self._has_outgoing = trio.Event()
            await self._has_outgoing.wait()

    def _start_message(self) -> ProcessStart:
        calls = [
            StageCall(config.name, config.factory, dict(config.params)) for config in self._configs
        ]
        return ProcessStart(calls, sys.path, logging.getLogger().getEffectiveLevel())

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        for config in self._configs:
            environment |= config.env
        return environment


def command(descriptor: int) -> list[str]:
    """The command line of a stage process."""
    return [*program_argv(), "replica", "stage-process", str(descriptor)]


async def _receive(stream: trio.SocketStream) -> bytes:
    try:
        return bytes(await stream.receive_some(READ_BYTES))
    except trio.BrokenResourceError:
        return b""


async def _wait_or_kill(child: trio.Process) -> None:
    with trio.move_on_after(EXIT_TIMEOUT_SECS):
        await child.wait()
    if child.returncode is None:
        child.kill()
        await child.wait()


def _describe_exit(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
