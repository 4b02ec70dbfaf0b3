"""Forking a process for each request that comes, and telling how each one ended. In the nest.

Invariant: there is one thread, so that a fork is whole; a fork holds nothing of the nest's or of
another fork's, and does not outlive the nest. Knows neither torch nor what the forks do.
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

from omni_proxy.process_group.ipc import Exited, ForkFailed, JsonSocket, News

PR_SET_PDEATHSIG: Final = 1
STANDARD: Final = 3  # descriptors: input, output, errors
REQUEST_DESCRIPTORS: Final = 3

Live = Callable[[socket.socket], None]


@dataclass(frozen=True, slots=True)
class _Child:
    """A fork. `news` is closed from outside to have it killed; `leash` closes when it has ended."""

    pid: int
    news: socket.socket
    leash: int


def run(control: socket.socket, live: Live) -> None:
    """Until the other end of `control` is closed; `live` is what a fork does with its socket."""
    # What is there stays, and pages that a fork's collector never writes to stay shared.
    gc.collect()
    gc.freeze()
    young: dict[int, _Child] = {}  # by each descriptor that tells of it
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                made = _hatched(control, live)
                if made is None:
                    return
                for each in made:
                    young[each.news.fileno()] = young[each.leash] = each
                    poll.register(each.news, select.POLLIN)
                    poll.register(each.leash, select.POLLIN)
            elif (known := young.get(descriptor)) is None:
                continue  # told of in the same breath as its end
            elif descriptor == known.leash:
                for mine in young.keys() & {known.news.fileno(), known.leash}:
                    poll.unregister(mine)
                    del young[mine]
                _bury(known)
            else:
                os.kill(known.pid, signal.SIGKILL)
                poll.unregister(descriptor)
                del young[descriptor]


def _hatched(control: socket.socket, live: Live) -> list[_Child] | None:
    """The fork that was asked for, if it came to be; None: nobody will ask any more."""
    _, descriptors, *_ = socket.recv_fds(control, 1, REQUEST_DESCRIPTORS)
    if len(descriptors) != REQUEST_DESCRIPTORS:
        return None
    wire, errors, told = descriptors
    news = socket.socket(fileno=told)
    leash, held = os.pipe2(os.O_CLOEXEC)
    nest = os.getpid()
    try:
        pid = 0 if _unwanted(news) else os.fork() or _live(live, wire, errors, held, nest)
    except OSError as error:
        _tell(news, ForkFailed(str(error)))
        pid = 0
    for each in (wire, errors, held):
        os.close(each)
    if pid:
        return [_Child(pid, news, leash)]
    news.close()
    os.close(leash)
    return []


def _unwanted(news: socket.socket) -> bool:
    """Whether it was given up while everything was being imported."""
    poll = select.poll()
    poll.register(news, select.POLLIN)
    return bool(poll.poll(0))


def _live(live: Live, wire: int, errors: int, held: int, nest: int) -> NoReturn:
    """The fork's whole life; it never returns."""
    status = 1
    try:
        for standard in (1, 2):
            os.dup2(errors, standard)
        first = STANDARD
        for kept in sorted((wire, held)):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        # Of the thread that forked, which is the only one there: it ends with the nest.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nest:
            live(socket.socket(fileno=wire))
            status = 0
    except Exception:
        traceback.print_exc()
    finally:
        # Not through the interpreter's end: threads may be deep inside something.
        os._exit(status)


def _bury(young: _Child) -> None:
    _, status = os.waitpid(young.pid, 0)
    _tell(young.news, Exited(os.waitstatus_to_exitcode(status)))
    young.news.close()
    os.close(young.leash)


def _tell(news: socket.socket, what: News) -> None:
    with suppress(OSError):  # nobody wants to know
        JsonSocket(news).send(what)
