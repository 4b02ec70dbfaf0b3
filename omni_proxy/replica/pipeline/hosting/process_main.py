"""Main function of a stage process: runs its stages in threads, exchanges frames over one socket.

Invariant: it does not outlive its parent: end of file on the socket ends it at once. SIGINT and
SIGTERM are ignored: the parent ends the process after its own drain.
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
    """`argv` is the number of the socket's file descriptor; ends the process with its parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(argv[0]))
    inboxes: dict[str, Inbox] = {}
    frames = FrameDecoder()
    handle: Callable[[bytes], None] = _start_stages(connection, inboxes)
    while data := _receive(connection):
        for body in frames.feed(data):
            handle(body)
            handle = _dispatch(inboxes)
    exit_process(0)  # stage threads may still run inside a model


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(READ_BYTES)
    except ConnectionResetError:
        return b""


def _start_stages(connection: socket.socket, inboxes: dict[str, Inbox]) -> Callable[[bytes], None]:
    def begin(body: bytes) -> None:
        start = msgspec.msgpack.decode(body, type=ProcessStart)
        logging.basicConfig(level=start.log_level, format=LOG_FORMAT)
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
        reason = f"stage {message.stage} made what cannot leave its process: {error}"
        match message:
            case Result(request_id, stage) | ResultChunk(request_id, stage):
                return encode_frame(StageFailure(request_id, stage, reason))
            case AdminResult(op_id, stage, action):
                return encode_frame(AdminResult(op_id, stage, action, False, reason, error=reason))
            case _:
                raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
