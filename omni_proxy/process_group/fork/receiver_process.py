"""The child process that joins groups: calls that may block forever or crash run in it.

It is forked by the fork server, which has imported all modules. It exits as soon as its parent's
end of the socket closes. Between commands it blocks in one read. It ignores SIGINT, SIGTERM and
SIGHUP, which its parent handles.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from omni_proxy.process_group.broadcast.mapped_file import map_file, map_for_receive, prefault
from omni_proxy.process_group.broadcast.transfer import LocalReceived, ReceiveOrder, Transfer
from omni_proxy.process_group.fork.forkserver import run
from omni_proxy.process_group.fork.ipc import (
    LOST,
    Arm,
    CheckTrainer,
    CloseSender,
    Command,
    Configure,
    Destroy,
    Event,
    Init,
    JsonSocket,
    Logged,
    NumberedCommand,
    OpenSender,
    ProgressReport,
    Ready,
    ReleaseBlocks,
    Reply,
    Send,
    TransferEnded,
    WaitForRanks,
)
from omni_proxy.process_group.rank_protocol import GroupLimits, Groups
from omni_proxy.process_group.sender import SendResult, ThreadSender
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan
from omni_proxy.shared.log_text import LogfmtFormatter

if TYPE_CHECKING:
    import torch

# Interval of progress reports to the parent.
REPORT_SECS: Final = 0.1


def main(argv: Sequence[str]) -> int:
    """Runs the fork server until its parent ends. `argv`: the descriptor of the control socket."""
    if len(argv) != 1 or not argv[0].isdecimal():
        sys.exit("receiver-process is started by omni-proxy itself, to join trainers' groups")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # No core dumps: gloo calls abort() to refuse a peer.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _import_torch()
    run(socket.socket(fileno=int(argv[0])), _serve)
    return 0


def _import_torch() -> None:
    """Imports all modules that a fork needs. None may start a thread or use a GPU."""
    import numpy as np
    import torch
    import torch.distributed

    np.empty(0)
    torch.set_num_threads(1)


def _serve(connection: socket.socket) -> None:
    """The main function of a fork: executes commands until the parent closes the socket."""
    channel = JsonSocket(connection)
    commands = msgspec.json.Decoder(Command)
    lines = channel.lines()
    first = next(lines, None)
    if first is None:
        return
    configure = commands.decode(first)
    assert isinstance(configure, Configure)
    events = _EventWriter(channel)
    logging.basicConfig(level=configure.log_level, handlers=[_ForwardingLogHandler(events)])
    events.write(Ready(os.getpid()))
    limits = GroupLimits(
        configure.stall_secs,
        configure.silent_secs,
        configure.ping_secs,
        first_byte_secs=configure.first_byte_secs,
        receive_secs=configure.receive_secs,
    )
    executor = _CommandExecutor(channel, events, limits)
    for line in lines:
        executor.submit(commands.decode(line))


class PassedDescriptor:
    """A descriptor received with a command.

    It is closed once: by the code that took it, or by `close` if it was not taken. The two may run
    in different threads.
    """

    def __init__(self, descriptor: int) -> None:
        self._lost = descriptor == LOST
        self._descriptors = [] if self._lost else [descriptor]

    def take(self) -> int:
        """The caller has to close it. Raises OSError if it was already taken, closed, or lost."""
        if self._lost:
            raise OSError(errno.EMFILE, "too many open files to receive shared memory")
        try:
            return self._descriptors.pop()
        except IndexError:
            raise OSError(errno.EBADF, "the command of this descriptor has ended") from None

    def close(self) -> None:
        while self._descriptors:
            with contextlib.suppress(IndexError):  # taken by another thread since the check
                os.close(self._descriptors.pop())


class _EventWriter:
    """Sends events to the parent; exits this process if the parent has ended."""

    def __init__(self, channel: JsonSocket) -> None:
        self._channel = channel

    def write(self, event: Event) -> None:
        try:
            self._channel.send(event)
        except OSError:
            os._exit(0)


class _ForwardingLogHandler(logging.Handler):
    """Sends log records to the parent, which logs them."""

    def __init__(self, events: _EventWriter) -> None:
        super().__init__()
        self.setFormatter(LogfmtFormatter())
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self._events.write(Logged(record.levelno, self.format(record)))


class _CommandExecutor:
    """Runs each command in its own thread, so that one that hangs does not block the others."""

    def __init__(self, channel: JsonSocket, events: _EventWriter, limits: GroupLimits) -> None:
        self._channel = channel
        self._events = events
        self._limits = limits
        self._groups = Groups(limits)
        self._sender: ThreadSender | None = None
        self._blocks: dict[int, torch.Tensor] = {}

    def submit(self, command: Command) -> None:
        match command:
            case Configure():
                raise ValueError("a second Configure")
            case ReleaseBlocks(blocks):
                for block in blocks:
                    self._blocks.pop(block, None)
            case _:
                shared = isinstance(command, Arm | Send) and command.block is not None
                # Taken here, in the order of the lines, so that each command gets its descriptor.
                descriptor = (
                    PassedDescriptor(self._channel.descriptors.popleft()) if shared else None
                )
                name = f"weights-{type(command).__name__.lower()}"
                threading.Thread(
                    target=self._run, args=(command, descriptor), name=name, daemon=True
                ).start()

    def _run(self, command: NumberedCommand, descriptor: PassedDescriptor | None) -> None:
        reply = Reply(command.number)
        transfer: Transfer[LocalReceived] | Transfer[SendResult] | None = None
        try:
            transfer = self._execute(command, descriptor, reply.values)
        except GroupError as error:
            reply.error, reply.dropped = str(error), error.group_dropped
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            reply.error, reply.dropped = f"{type(error).__name__}: {error}", True
        finally:
            if descriptor is not None:
                descriptor.close()
        self._events.write(reply)
        if transfer is not None:
            self._report_transfer(command.number, transfer)

    def _execute(
        self,
        command: NumberedCommand,
        descriptor: PassedDescriptor | None,
        values: dict[str, int],
    ) -> Transfer[LocalReceived] | Transfer[SendResult] | None:
        match command:
            case Init(rendezvous=rendezvous):
                self._groups.init(rendezvous)
            case Arm():
                return self._arm(command, descriptor)
            case Destroy(group_name=name):
                self._groups.destroy(name)
            case CheckTrainer(group_name=name, ping=ping):
                values["owner_gone"] = int(self._groups.owner_gone(name))
                values["owner_answers"] = int(ping and self._groups.owner_answers(name))
            case OpenSender(rendezvous=rendezvous):
                self._sender = ThreadSender(rendezvous, self._limits.stall_secs)
                values["port"] = self._sender.port
            case WaitForRanks():
                self._require_sender().wait_for_ranks()
            case Send():
                return self._send(command, descriptor)
            case CloseSender():
                self._require_sender().close()
        return None

    def _require_sender(self) -> ThreadSender:
        if self._sender is None:
            raise GroupError("this process is not rank 0 of a group")
        return self._sender

    def _send(self, command: Send, descriptor: PassedDescriptor | None) -> Transfer[SendResult]:
        if command.region is not None:
            return self._require_sender().send(command.plans, command.region)
        assert command.block is not None
        assert descriptor is not None
        block = self._map_block(command.block, descriptor.take())
        order = ReceiveOrder(command.plans)
        parts = [
            block[message.offset : message.offset + message.nbytes]
            for message in order.merged_plan.messages
        ]
        return self._require_sender().broadcast(order, parts)

    def _arm(self, command: Arm, descriptor: PassedDescriptor | None) -> Transfer[LocalReceived]:
        region = command.region
        starts = region.starts if region is not None else None

        def allocate(plan: TensorPlan) -> torch.Tensor:
            if region is not None:
                return map_for_receive(region, command.plans)(plan)
            assert command.block is not None
            assert descriptor is not None
            return self._map_block(command.block, descriptor.take())

        order = ReceiveOrder(command.plans, command.digests, starts, allocate)
        return self._groups.arm(command.group_name, order, ready_secs=command.ready_secs)

    def _map_block(self, number: int, descriptor: int) -> torch.Tensor:
        """Returns the shared block, which is mapped and prefaulted at its first use."""
        try:
            if number not in self._blocks:
                block = map_file(descriptor, os.fstat(descriptor).st_size)
                prefault(block, 0, block.numel())
                self._blocks[number] = block
        finally:
            os.close(descriptor)
        return self._blocks[number]

    def _report_transfer(
        self, number: int, transfer: Transfer[LocalReceived] | Transfer[SendResult]
    ) -> None:
        reported = transfer.progress()
        while not transfer.has_ended():
            # Report each complete bucket immediately, so that the parent can announce it.
            if (progress := transfer.wait_past(reported.buckets_done, REPORT_SECS)) != reported:
                reported = progress
                self._events.write(
                    ProgressReport(number, progress.messages_done, progress.bytes_received)
                )
        if (fault := transfer.fault()) is not None:
            self._events.write(TransferEnded(number, str(fault), fault.group_dropped))
            return
        result = transfer.wait(0)
        digests = result.digests if isinstance(result, LocalReceived) else {}
        self._events.write(TransferEnded(number, secs=result.secs, digests=digests))
        # After the report, because unmapping a whole version takes time.
        if isinstance(result, LocalReceived):
            result.close()


if __name__ == "__main__":
    main(sys.argv[1:])
