"""The process that receives: everything that may block for ever or be ended by a peer is in here.

It is forked by the nest, which has imported everything (hatchery.py), and does not outlive the
process that gives it orders: the end of their socket ends it at once. Between orders it sleeps in
one read. Signals meant for the whole group are left to that process.
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

from omni_proxy.process_group.forkserver import run
from omni_proxy.process_group.group import GroupLimits, Groups
from omni_proxy.process_group.ipc import (
    LOST,
    Arm,
    Ask,
    Begin,
    Destroy,
    Down,
    Ended,
    Forget,
    Init,
    JsonSocket,
    Leave,
    Logged,
    Meet,
    Moved,
    Numbered,
    Open,
    Ready,
    Reply,
    Send,
    Up,
)
from omni_proxy.process_group.mapped_file import mapped, touch
from omni_proxy.process_group.sender import Sent
from omni_proxy.process_group.tensor_plan import GroupError, TensorPlan
from omni_proxy.process_group.thread_receiver import file_block
from omni_proxy.process_group.thread_sender import LocalSender
from omni_proxy.process_group.transfer import LocalReceived, ReceiveOrder, Transfer

if TYPE_CHECKING:
    import torch

# How often the parent hears how far a receive has come.
TELL_SECS: Final = 0.1


def main(argv: Sequence[str]) -> int:
    """`argv` is the number of the socket that asks for forks; ends with the parent."""
    if len(argv) != 1 or not argv[0].isdecimal():
        sys.exit("receiver-process is for omni-proxy itself, which joins trainers' groups in it")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # gloo's way of refusing is an abort: nobody wants the memory of that on disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _import_torch()
    run(socket.socket(fileno=int(argv[0])), _serve)
    return 0


def _import_torch() -> None:
    """All that a fork needs. Nothing in here may start a thread, or touch a GPU."""
    import numpy as np
    import torch
    import torch.distributed

    np.empty(0)
    torch.set_num_threads(1)


def _serve(connection: socket.socket) -> None:
    """What a fork does: orders, until its parent is gone."""
    wire = JsonSocket(connection)
    orders = msgspec.json.Decoder(Down)
    lines = wire.lines()
    first = next(lines, None)
    if first is None:
        return
    begin = orders.decode(first)
    assert isinstance(begin, Begin)
    told = _Told(wire)
    logging.basicConfig(level=begin.log_level, handlers=[_ToParent(told)])
    told.tell(Ready(os.getpid()))
    limits = GroupLimits(
        begin.stall_secs,
        begin.silent_secs,
        begin.ping_secs,
        first_byte_secs=begin.first_byte_secs,
        receive_secs=begin.receive_secs,
    )
    work = _Work(wire, told, limits)
    for line in lines:
        work.take(orders.decode(line))


class Handed:
    """A descriptor that came beside an order. It is closed once: by whoever took it, or by `close`
    where nobody did. The two may come from different threads."""

    def __init__(self, descriptor: int) -> None:
        self._lost = descriptor == LOST
        self._held = [] if self._lost else [descriptor]

    def take(self) -> int:
        """The taker closes it. Raises OSError where it was taken or closed, or never came."""
        if self._lost:
            raise OSError(errno.EMFILE, "too many open files to take shared memory")
        try:
            return self._held.pop()
        except IndexError:
            raise OSError(errno.EBADF, "the order that it belonged to is over") from None

    def close(self) -> None:
        while self._held:
            with contextlib.suppress(IndexError):  # taken in this moment
                os.close(self._held.pop())


class _Told:
    """What goes up; without a parent there is nothing left to do."""

    def __init__(self, wire: JsonSocket) -> None:
        self._wire = wire

    def tell(self, message: Up) -> None:
        try:
            self._wire.send(message)
        except OSError:
            os._exit(0)


class _ToParent(logging.Handler):
    def __init__(self, told: _Told) -> None:
        super().__init__()
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told.tell(Logged(record.levelno, self.format(record)))


class _Work:
    """Each order in a thread of its own: one that hangs keeps nobody else waiting."""

    def __init__(self, wire: JsonSocket, told: _Told, limits: GroupLimits) -> None:
        self._wire = wire
        self._told = told
        self._limits = limits
        self._groups = Groups(limits)
        self._sender: LocalSender | None = None
        self._blocks: dict[int, torch.Tensor] = {}

    def take(self, order: Down) -> None:
        match order:
            case Begin():
                raise ValueError("a second beginning")
            case Forget(blocks):
                for block in blocks:
                    self._blocks.pop(block, None)
            case _:
                shared = isinstance(order, Arm | Send) and order.block is not None
                # Here, in the order of the lines: so descriptors and orders stay together.
                arguments = (order, Handed(self._wire.descriptors.popleft()) if shared else None)
                name = f"weights-{type(order).__name__.lower()}"
                threading.Thread(target=self._run, args=arguments, name=name, daemon=True).start()

    def _run(self, order: Numbered, descriptor: Handed | None) -> None:
        reply = Reply(order.number)
        underway: Transfer[LocalReceived] | Transfer[Sent] | None = None
        try:
            underway = self._obey(order, descriptor, reply.found)
        except GroupError as error:
            reply.error, reply.dropped = str(error), error.group_dropped
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            reply.error, reply.dropped = f"{type(error).__name__}: {error}", True
        finally:
            if descriptor is not None:
                descriptor.close()
        self._told.tell(reply)
        if underway is not None:
            self._follow(order.number, underway)

    def _obey(
        self, order: Numbered, descriptor: Handed | None, found: dict[str, int]
    ) -> Transfer[LocalReceived] | Transfer[Sent] | None:
        match order:
            case Init(rendezvous=rendezvous):
                self._groups.init(rendezvous)
            case Arm():
                return self._arm(order, descriptor)
            case Destroy(group_name=name):
                self._groups.destroy(name)
            case Ask(group_name=name, ping=ping):
                found["owner_gone"] = int(self._groups.owner_gone(name))
                found["owner_answers"] = int(ping and self._groups.owner_answers(name))
            case Open(meeting=meeting):
                self._sender = LocalSender(meeting, self._limits.stall_secs)
                found["port"] = self._sender.port
            case Meet():
                self._led().meet()
            case Send():
                return self._send(order, descriptor)
            case Leave():
                self._led().close()
        return None

    def _led(self) -> LocalSender:
        if self._sender is None:
            raise GroupError("this process is rank 0 of no group")
        return self._sender

    def _send(self, order: Send, descriptor: Handed | None) -> Transfer[Sent]:
        if order.place is not None:
            return self._led().send(order.plans, order.place)
        assert order.block is not None
        assert descriptor is not None
        block = self._shared(order.block, descriptor.take())
        wanted = ReceiveOrder(order.plans)
        parts = [block[each.offset : each.offset + each.nbytes] for each in wanted.whole.messages]
        return self._led().broadcast(wanted, parts)

    def _arm(self, order: Arm, descriptor: Handed | None) -> Transfer[LocalReceived]:
        place = order.place
        starts = place.starts if place is not None else None

        def block(whole: TensorPlan) -> torch.Tensor:
            if place is not None:
                return file_block(place, order.plans)(whole)
            assert order.block is not None
            assert descriptor is not None
            return self._shared(order.block, descriptor.take())

        wanted = ReceiveOrder(order.plans, order.digests, starts, block)
        return self._groups.arm(order.group_name, wanted, ready_secs=order.ready_secs)

    def _shared(self, number: int, descriptor: int) -> torch.Tensor:
        """The shared block, mapped and touched once however often it is received into."""
        try:
            if number not in self._blocks:
                block = mapped(descriptor, os.fstat(descriptor).st_size)
                touch(block, 0, block.numel())
                self._blocks[number] = block
        finally:
            os.close(descriptor)
        return self._blocks[number]

    def _follow(self, number: int, underway: Transfer[LocalReceived] | Transfer[Sent]) -> None:
        told = underway.progress()
        while not underway.ended(0):
            # Whoever reads what has come while the rest comes hears of each bucket at once.
            if (now := underway.moved_past(told.buckets_done, TELL_SECS)) != told:
                told = now
                self._told.tell(Moved(number, now.messages_done, now.bytes_come))
        if (fault := underway.fault()) is not None:
            self._told.tell(Ended(number, str(fault), fault.group_dropped))
            return
        result = underway.wait(0)
        digests = result.digests if isinstance(result, LocalReceived) else {}
        self._told.tell(Ended(number, secs=result.secs, digests=digests))
        # Only now: to unmap a version takes a while, and nobody has to wait for that.
        if isinstance(result, LocalReceived):
            result.close()


if __name__ == "__main__":
    main(sys.argv[1:])
