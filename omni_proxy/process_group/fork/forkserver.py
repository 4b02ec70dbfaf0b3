"""The fork server's loop: forks a process for each request and reports how each one exited.

Invariant: the server has a single thread, so that a fork is consistent; a fork inherits no
descriptor of the server or of another fork, and does not outlive the server. This module imports
neither torch nor the code that forks run.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

from omni_proxy.process_group.fork.ipc import Exited, ForkEvent, ForkFailed, JsonSocket

PR_SET_PDEATHSIG: Final = 1
FIRST_FREE_DESCRIPTOR: Final = 3  # after stdin, stdout and stderr
REQUEST_DESCRIPTORS: Final = 3

ForkMain = Callable[[socket.socket], None]


@dataclass(frozen=True, slots=True)
class _Child:
    """A fork. It is killed when the client closes `events`; `exit_pipe` closes when it exits."""

    pid: int
    events: socket.socket
    exit_pipe: int


def run(control: socket.socket, fork_main: ForkMain) -> None:
    """Serves until the other end of `control` is closed; a fork runs `fork_main(its socket)`."""
    # A fork's garbage collector doesn't touch frozen objects, so their pages stay shared.
    gc.collect()
    gc.freeze()
    children: dict[int, _Child] = {}  # each child is listed under both of its descriptors
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                forked = _handle_request(control, fork_main)
                if forked is None:
                    return
                for forked_child in forked:
                    for handle in (forked_child.events.fileno(), forked_child.exit_pipe):
                        children[handle] = forked_child
                        poll.register(handle, select.POLLIN)
            elif (child := children.get(descriptor)) is None:
                continue  # the child's exit was handled earlier in the same poll result
            elif descriptor == child.exit_pipe:
                for registered in children.keys() & {child.events.fileno(), child.exit_pipe}:
                    poll.unregister(registered)
                    del children[registered]
                _reap(child)
            else:
                os.kill(child.pid, signal.SIGKILL)
                poll.unregister(descriptor)
                del children[descriptor]


def _handle_request(control: socket.socket, fork_main: ForkMain) -> list[_Child] | None:
    """Forks; returns the child, [] if that failed, or None if the client closed `control`."""
    _, descriptors, *_ = socket.recv_fds(control, 1, REQUEST_DESCRIPTORS)
    if len(descriptors) != REQUEST_DESCRIPTORS:
        return None
    channel, stderr, events_descriptor = descriptors
    events = socket.socket(fileno=events_descriptor)
    exit_pipe, child_end = os.pipe2(os.O_CLOEXEC)
    server_pid = os.getpid()
    try:
        pid = (
            0
            if _is_cancelled(events)
            else os.fork() or _run_fork(fork_main, channel, stderr, child_end, server_pid)
        )
    except OSError as error:
        _send_event(events, ForkFailed(str(error)))
        pid = 0
    for descriptor in (channel, stderr, child_end):
        os.close(descriptor)
    if pid:
        return [_Child(pid, events, exit_pipe)]
    events.close()
    os.close(exit_pipe)
    return []


def _is_cancelled(events: socket.socket) -> bool:
    """Whether the client cancelled the fork while the server still imported modules."""
    poll = select.poll()
    poll.register(events, select.POLLIN)
    return bool(poll.poll(0))


def _run_fork(
    fork_main: ForkMain, channel: int, stderr: int, child_end: int, server_pid: int
) -> NoReturn:
    """Runs the fork to its exit; never returns."""
    status = 1
    try:
        for standard in (1, 2):
            os.dup2(stderr, standard)
        first = FIRST_FREE_DESCRIPTOR
        for kept in sorted((channel, child_end)):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        # The signal is sent when the forking thread ends; that is the server's only thread.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server_pid:
            fork_main(socket.socket(fileno=channel))
            status = 0
    except Exception:
        traceback.print_exc()
    finally:
        # Skips the interpreter's shutdown: threads may be blocked inside torch.
        os._exit(status)


def _reap(child: _Child) -> None:
    _, status = os.waitpid(child.pid, 0)
    _send_event(child.events, Exited(os.waitstatus_to_exitcode(status)))
    child.events.close()
    os.close(child.exit_pipe)


def _send_event(events: socket.socket, event: ForkEvent) -> None:
    with suppress(OSError):  # the client no longer reads
        JsonSocket(events).send(event)
