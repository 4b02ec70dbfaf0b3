"""Stages in a child process: the parent's handle, the frames of their socket, the child's main.

A frame is four bytes of length, big-endian, then a msgpack body. Invariant: a frame is complete, or
the connection is closed. When `live` returns, also by cancellation, the child process has exited;
its end, for any reason, is reported immediately for each of its stages. The child does not outlive
its parent: end of file on the socket ends it. It ignores SIGINT and SIGTERM, because the parent
ends it after its own drain.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import trio

from omni_proxy.replica.hard_exit import exit_process
from omni_proxy.replica.pipeline.config import FlowError, StageConfig
from omni_proxy.replica.pipeline.stage import (
    Inbox,
    make_inbox,
    run_stage,
)
from omni_proxy.replica.pipeline.stage_messages import (
    AdminResult,
    Emit,
    Result,
    ResultChunk,
    Shutdown,
    StageEnded,
    StageFailure,
    StageInput,
    StageOutput,
)
from omni_proxy.shared.child_process import exit_text, program_argv, wait_or_kill
from omni_proxy.shared.log_text import log_to_stderr

LENGTH_BYTES = 4
MAX_BYTES = 1 << 30

Message = TypeVar("Message")
_encoder = msgspec.msgpack.Encoder()
READ_BYTES = 1 << 18
log = logging.getLogger(__name__)
_decoder: msgspec.msgpack.Decoder[StageOutput] = msgspec.msgpack.Decoder(StageOutput)


class FrameError(Exception):
    """The data is not a frame of this protocol: the connection is unusable."""


class ProcessStart(msgspec.Struct, frozen=True):
    """The first message to a stage process: its stages, and where to find their modules."""

    stages: list[StageCall]
    sys_path: list[str]
    log_level: int


class StageCall(msgspec.Struct, frozen=True):
    """One stage's factory and its parameters."""

    name: str
    factory: str
    params: dict[str, Any]


class ToStage(msgspec.Struct, frozen=True, array_like=True):
    """Later messages to a stage process: a message and its stage."""

    stage: str
    message: StageInput


def encode_frame(message: Any) -> bytes:
    """Raises TypeError, ValueError or OverflowError for what msgpack cannot encode."""
    body = _encoder.encode(message)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is over the bound of {MAX_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameDecoder:
    """Takes bytes as they arrive, yields complete bodies; raises FrameError if one is too long."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(buffer[:LENGTH_BYTES], "big")
            if end > MAX_BYTES + LENGTH_BYTES:
                raise FrameError(f"a frame of {end} bytes is over the bound of {MAX_BYTES}")
            if len(buffer) < end:
                return
            body = bytes(buffer[LENGTH_BYTES:end])
            del buffer[:end]
            yield body


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
            raise FlowError(f"the message to stage {stage} cannot be sent: {error}") from error
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
        parent_end, child_end = socket.socketpair()
        with child_end:
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(parent_end))
            child = await trio.lowlevel.open_process(
                command(child_end.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
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
                status = await wait_or_kill(child)
        return f"process {self.name} {exit_text(status)}"

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
                    return  # the reading task gets end of file
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


def run_stage_process(argv: Sequence[str]) -> int:
    """Run a stage process; `argv` is its socket's file descriptor. Exits when the parent does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(argv[0]))
    inboxes: dict[str, Inbox] = {}
    frames = FrameDecoder()
    handle: Callable[[bytes], None] = _start_stages(connection, inboxes)
    while data := _receive_frames(connection):
        for body in frames.feed(data):
            handle(body)
            handle = _dispatch(inboxes)
    exit_process(0)  # stage threads may still run inside a model


def _receive_frames(connection: socket.socket) -> bytes:
    try:
        return connection.recv(READ_BYTES)
    except ConnectionResetError:
        return b""


def _start_stages(connection: socket.socket, inboxes: dict[str, Inbox]) -> Callable[[bytes], None]:
    def begin(body: bytes) -> None:
        start = msgspec.msgpack.decode(body, type=ProcessStart)
        log_to_stderr(start.log_level)
        sys.path[:] = start.sys_path
        emit = _make_emit(connection)
        for stage in start.stages:
            inboxes[stage.name] = make_inbox(stage.name)
        for stage in start.stages:
            _start(stage, inboxes[stage.name], emit)

    return begin


def _start(stage: StageCall, inbox: Inbox, emit: Emit) -> None:
    threading.Thread(
        target=run_stage,
        args=(stage.name, stage.factory, stage.params, inbox, emit),
        name=stage.name,
        daemon=True,
    ).start()


def _dispatch(inboxes: dict[str, Inbox]) -> Callable[[bytes], None]:
    decoder = msgspec.msgpack.Decoder(ToStage)

    def dispatch(body: bytes) -> None:
        to_stage = decoder.decode(body)
        message: StageInput = to_stage.message
        inboxes[to_stage.stage].put(message)

    return dispatch


def _make_emit(connection: socket.socket) -> Emit:
    lock = threading.Lock()

    def emit(message: StageOutput) -> None:
        frame = _encode_or_fail(message)
        try:
            with lock:
                connection.sendall(frame)
        except OSError:
            os._exit(0)  # the parent has exited

    return emit


def _encode_or_fail(message: StageOutput) -> bytes:
    try:
        return encode_frame(message)
    except (TypeError, ValueError, OverflowError) as error:
        log.error("message_not_encodable stage=%s error=%s", message.stage, error)
        reason = f"stage {message.stage} produced a message that cannot be encoded: {error}"
        match message:
            case Result(request_id, stage) | ResultChunk(request_id, stage):
                return encode_frame(StageFailure(request_id, stage, reason))
            case AdminResult(op_id, stage, action):
                return encode_frame(AdminResult(op_id, stage, action, False, reason, error=reason))
            case _:
                raise
