"""A child process: runs its stages in threads, speaks frames over one inherited socket.

Invariant: it does not outlive its parent: the socket's end of file ends it at once. Signals meant
for the whole group are left to the parent, which ends it when its work is done.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from omni_proxy.replica.hard_exit import exit_process
from omni_proxy.replica.pipeline.hosting.frames import (
    FrameDecoder,
    ProcessStart,
    StageCall,
    ToStage,
    encode_frame,
)
from omni_proxy.replica.pipeline.hosting.stage_runner import (
    LOG_FORMAT,
    Inbox,
    make_inbox,
    run_stage,
)
from omni_proxy.replica.pipeline.messages import (
    AdminResult,
    Emit,
    Result,
    ResultChunk,
    StageFailure,
    StageInput,
    StageOutput,
)

READ_BYTES = 1 << 18

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """`argv` is the number of the socket's file descriptor; returns when the parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(argv[0]))
    inboxes: dict[str, Inbox] = {}
    frames = FrameDecoder()
    take: Callable[[bytes], None] = _beginning(connection, inboxes)
    while data := _received(connection):
        for body in frames.feed(data):
            take(body)
            take = _passing_on(inboxes)
    exit_process(0)  # threads may be deep inside a model


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(READ_BYTES)
    except ConnectionResetError:
        return b""


def _beginning(connection: socket.socket, inboxes: dict[str, Inbox]) -> Callable[[bytes], None]:
    def begin(body: bytes) -> None:
        start = msgspec.msgpack.decode(body, type=ProcessStart)
        logging.basicConfig(level=start.log_level, format=LOG_FORMAT)
        sys.path[:] = start.sys_path
        emit = _emitting(connection)
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


def _passing_on(inboxes: dict[str, Inbox]) -> Callable[[bytes], None]:
    decoder = msgspec.msgpack.Decoder(ToStage)

    def pass_on(body: bytes) -> None:
        order = decoder.decode(body)
        message: StageInput = order.message
        inboxes[order.stage].put(message)

    return pass_on


def _emitting(connection: socket.socket) -> Emit:
    lock = threading.Lock()

    def emit(message: StageOutput) -> None:
        frame = _framed(message)
        try:
            with lock:
                connection.sendall(frame)
        except OSError:
            os._exit(0)  # the parent is gone

    return emit


def _framed(message: StageOutput) -> bytes:
    try:
        return encode_frame(message)
    except (TypeError, ValueError, OverflowError) as fault:
        log.error("a message of stage %s cannot leave its process: %s", message.stage, fault)
        reason = f"stage {message.stage} made what cannot leave its process: {fault}"
        match message:
            case Result(request_id, stage) | ResultChunk(request_id, stage):
                return encode_frame(StageFailure(request_id, stage, reason))
            case AdminResult(op_id, stage, action):
                return encode_frame(AdminResult(op_id, stage, action, False, reason, error=reason))
            case _:
                raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
