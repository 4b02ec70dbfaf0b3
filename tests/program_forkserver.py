"""Runs `omni-proxy` as a fork of a process that has imported it, since imports take seconds.

A fork runs `python -m omni_proxy` with its own arguments, environment, folder and stderr. It is a
child of the fork server, which reports its exit status; signals are sent to it directly. Imported
modules must not start threads: a fork would not have them.

A fork can also run another module with a socket, as trainers in tests do, which need torch too.

A process that a fork starts as `sys.executable -m omni_proxy` is also a fork: `sys.executable` is a
copy of `forked_program` there, unless OWN_INTERPRETERS is in the environment.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import marshal
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NoReturn

import trio

ROOT = Path(__file__).parents[1]
ENV = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
OWN_INTERPRETERS = "OMNI_TESTS_OWN_INTERPRETERS"
MESSAGE_BYTES = 1 << 17
MAX_DESCRIPTORS = 253  # in one message to the kernel
CONNECTION = 3  # the descriptor of the socket of `ForkServer.over`
PROXY = (
    "omni_proxy.cli.serve",
    "omni_proxy.server",
    "omni_proxy.multiprocess.dataplane_process",
    # Imported when it begins to serve.
    "anyio._core._sockets",
    "importlib.resources.readers",
    "encodings.idna",
)
REPLICA = (
    "torch",
    "tiktoken",
    "jinja2",
    "safetensors.torch",
    "omni_proxy.replica.replica_command",
    "omni_proxy.replica.api.app",
    "omni_proxy.replica.stages.prepare",
    "omni_proxy.replica.stages.text",
    "omni_proxy.replica.models.tiny",
    # What trainers import.
    "torch.distributed",
    "tools.training.__main__",
)
IMPORTED = {"proxy": PROXY, "replica": REPLICA}


class ForkServerProcess:
    """A fork server for several processes. It ends at `close`; its forks do not."""

    def __init__(self, name: str) -> None:
        self._connection, server_end = socket.socketpair()
        with server_end, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(interpreter_folder() / name))
            listener.listen(64)
            passed = [server_end.fileno(), listener.fileno()]
            command = [sys.executable, "-m", __name__, *map(str, passed)]
            self._process = subprocess.Popen(
                [*command, str(interpreter_folder() / "python"), *IMPORTED[name]],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENV},
            )

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


class ForkServer:
    """A connection of this process to a fork server. `name`: of the server's listening socket."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(str(interpreter_folder() / name))

    async def start(self, *words: str, stderr: int | None = None) -> Forked:
        """Starts the program with these arguments. Without `stderr`, its stderr is /dev/null."""
        return Forked(*await trio.to_thread.run_sync(self._start, words, stderr, os.environ))

    def popen(self, *words: str, stderr: int | None = None) -> ForkedPopen:
        """The same without an event loop; the environment has the settings of the fork server."""
        return ForkedPopen(*self._start(words, stderr, {**os.environ, **ENV}))

    def over(self, connection: socket.socket, module: str) -> ForkedPopen:
        """Starts another module with a copy of this socket as descriptor CONNECTION."""
        environ = {**os.environ, **ENV}
        return ForkedPopen(*self._start((), 2, environ, module, connection.fileno()))

    def _start(
        self,
        words: tuple[str, ...],
        stderr: int | None,
        environ: Mapping[str, str],
        module: str = "omni_proxy",
        *connection: int,
    ) -> tuple[int, int, socket.socket]:
        request = {"words": (module, *words), "environ": dict(environ), "folder": os.getcwd()}
        ended, reports = socket.socketpair()
        with self._lock, reports, open(os.devnull, "wb") as discarded:
            sent = [discarded.fileno() if stderr is None else stderr, reports.fileno(), *connection]
            socket.send_fds(self._connection, [json.dumps(request).encode()], sent)
            pid, descriptors, *_ = socket.recv_fds(self._connection, 32, 1)
        if not descriptors:
            raise RuntimeError("the fork server has ended: its reason is on stderr")
        return int(pid), descriptors[0], ended

    def close(self) -> None:
        self._connection.close()


@cache
def forkserver(*imported: str) -> ForkServer:
    """The fork server with these imports: one for all tests of a run, until `close_forkservers`."""
    name = next(name for name, modules in IMPORTED.items() if modules == imported)
    if _PLACE.starter is None:
        _PLACE.start(name)
    else:
        with (interpreter_folder() / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one request at a time
            _PLACE.starter.sendall(name.encode())
            if not _PLACE.starter.recv(1):
                raise RuntimeError("the process that starts fork servers has ended")
    server = ForkServer(name)
    _CONNECTED.append(server)
    return server


@dataclass
class Place:
    """The fork servers of this process. `starter`: a connection to the process that starts them."""

    started: dict[str, ForkServerProcess] = field(default_factory=dict)
    starter: socket.socket | None = None
    owner: int = 0  # the process that removes the folder

    def start(self, name: str) -> None:
        if name not in self.started:
            self.started[name] = ForkServerProcess(name)


_PLACE = Place()
_CONNECTED: list[ForkServer] = []


def share_forkservers() -> tuple[socket.socket, Callable[[], None]]:
    """Lets forks of this process use the same fork servers: one import of torch costs more than a
    hundred tests. This process starts a server at the first request for it. It has to call the
    returned function whenever the returned socket is readable."""
    interpreter_folder()
    requests, _PLACE.starter = socket.socketpair()

    def start_requested() -> None:
        _PLACE.start(requests.recv(32).decode())
        requests.sendall(b".")

    return requests, start_requested


def close_forkservers() -> None:
    """Closes the connections of this process, and the fork servers that it has started."""
    forkserver.cache_clear()
    while _CONNECTED:
        _CONNECTED.pop().close()
    if _PLACE.owner == os.getpid():
        while _PLACE.started:
            _PLACE.started.popitem()[1].close()
        shutil.rmtree(interpreter_folder())
        interpreter_folder.cache_clear()
        _PLACE.owner = 0


def forking_interpreter() -> str:
    """The path of an interpreter that runs `-m omni_proxy` as a fork, with torch where needed."""
    forkserver(*REPLICA)
    return program_interpreter()


def program_interpreter() -> str:
    """The same, but commands that need torch do not run as a fork."""
    forkserver(*PROXY)
    return str(interpreter_folder() / "python")


@cache
def interpreter_folder() -> Path:
    """The folder with `python`, which makes fork servers start programs, and with their sockets."""
    folder = Path(tempfile.mkdtemp(prefix="omni-"))
    _PLACE.owner = os.getpid()
    stand_in = folder / "python"
    stand_in.write_text(
        f"#!{sys.executable} -SEs\n" + Path(__file__).with_name("forked_program.py").read_text()
    )
    stand_in.chmod(0o755)
    return folder


class _Forked:
    """A process that is not our child: its fork server sends the exit status to `ended`."""

    def __init__(self, pid: int, descriptor: int, ended: socket.socket) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._ended = ended
        self._ended.setblocking(False)
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        if self._status is None:
            try:
                self._status = int(self._ended.recv(32))
            except BlockingIOError:
                return None
            self._ended.close()
            os.close(self._descriptor)
        return self._status

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            try:
                signal.pidfd_send_signal(self._descriptor, number)
            except ProcessLookupError:
                return  # it has ended, and its fork server will report it

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(_Forked):
    """A fork with the interface of trio.Process."""

    def __init__(self, pid: int, descriptor: int, ended: socket.socket) -> None:
        super().__init__(pid, descriptor, ended)
        self._lock = trio.Lock()

    async def wait(self) -> int:
        async with self._lock:
            while (status := self.returncode) is None:
                await trio.lowlevel.wait_readable(self._ended)
        return status


class ForkedPopen(_Forked):
    """A fork with the interface of subprocess.Popen."""

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutError."""
        while (status := self.returncode) is None:
            # poll, not select: a test process may hold more than select's 1,024 descriptors.
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return status


@dataclass
class Fork:
    """A running fork. `reports` gets its exit status; its end kills the fork if `owned`."""

    pid: int
    exits: int
    reports: socket.socket
    owned: bool


def serve(control: socket.socket, listener: socket.socket, stand_in: str) -> list[str] | None:
    """Returns the module and arguments in each fork; None in the server, once `control` closes."""
    with selectors.DefaultSelector() as selector:
        server = _Server(selector, control, listener, stand_in)
        while True:
            for key, _ in selector.select():
                handled = server.handle(key)
                if handled is not False:
                    return handled


class _Server:
    def __init__(self, selector, control, listener, stand_in) -> None:
        self._selector = selector
        self._control, self._listener, self._stand_in = control, listener, stand_in
        self._forks: dict[int, Fork] = {}  # by process id
        for each in (control, listener):
            selector.register(each, selectors.EVENT_READ)

    def handle(self, key: selectors.SelectorKey) -> list[str] | bool | None:
        """Returns False, except in a fork and at the end of the server."""
        match key.data:
            case None if key.fileobj is self._control:
                return None
            case None if key.fileobj is self._listener:
                self._selector.register(self._listener.accept()[0], selectors.EVENT_READ)
            case None:
                return self._answer(key.fileobj)
            case Fork() as fork if fork.pid not in self._forks:
                pass  # it was reported earlier in the same iteration
            case Fork() as fork if key.fd == fork.exits:
                self._report(fork)
            case Fork() as fork:
                self._pass_signal(fork)
        return False

    def _answer(self, connection: socket.socket) -> list[str] | bool:
        """Handles a request: a test process sends many over a connection, `forked_program` one."""
        try:
            message, descriptors, *_ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_DESCRIPTORS)
        except ConnectionResetError:
            message, descriptors = b"", []
        if message.startswith(b"{"):
            return self._fork_for_test(connection, json.loads(message), descriptors)
        self._selector.unregister(connection)
        if message:
            return self._fork_for_program(connection, message, descriptors)
        connection.close()
        return False

    def _fork_for_test(
        self, connection: socket.socket, request: dict, descriptors: list[int]
    ) -> list[str] | bool:
        stderr, reports = descriptors.pop(0), socket.socket(fileno=descriptors.pop(0))
        if not (pid := os.fork()):
            self._leave(reports)
            extra = dict(zip([CONNECTION], descriptors, strict=False))
            return self._become(request, {2: stderr, **extra})
        for each in (stderr, *descriptors):
            os.close(each)
        fork = self._watch(pid, reports, owned=False)
        with suppress(OSError):  # the test process has been killed
            socket.send_fds(connection, [str(pid).encode()], [fork.exits])
        return False

    def _fork_for_program(
        self, connection: socket.socket, message: bytes, descriptors: list[int]
    ) -> list[str] | bool:
        """Starts the fork that `forked_program` requests."""
        words, environ, folder, numbers = marshal.loads(message)
        if not (pid := os.fork()):
            self._leave(connection)
            os.setsid()
            request = {"words": words, "environ": environ, "folder": folder}
            return self._become(request, dict(zip(numbers, descriptors, strict=True)))
        for each in descriptors:
            os.close(each)
        fork = self._watch(pid, connection, owned=True)
        self._selector.register(connection, selectors.EVENT_READ, fork)
        return False

    def _watch(self, pid: int, reports: socket.socket, *, owned: bool) -> Fork:
        fork = Fork(pid, os.pidfd_open(pid), reports, owned)
        self._forks[pid] = fork
        self._selector.register(fork.exits, selectors.EVENT_READ, fork)
        return fork

    def _report(self, fork: Fork) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        self._selector.unregister(fork.exits)
        if fork.owned and fork.reports.fileno() in self._selector.get_map():
            self._selector.unregister(fork.reports)
        del self._forks[fork.pid]
        os.close(fork.exits)
        with fork.reports, suppress(OSError):
            fork.reports.send(str(status).encode())

    def _pass_signal(self, fork: Fork) -> None:
        try:
            received = fork.reports.recv(1)
        except ConnectionResetError:
            received = b""
        if received:
            signal.pidfd_send_signal(fork.exits, received[0])
            return
        self._selector.unregister(fork.reports)
        signal.pidfd_send_signal(fork.exits, signal.SIGKILL)

    def _leave(self, reports: socket.socket) -> None:
        """Closes, in a fork, the descriptors of the server and of other forks."""
        for key in self._selector.get_map().values():
            if key.data is None:
                key.fileobj.close()
        reports.close()
        for fork in self._forks.values():
            os.close(fork.exits)
            fork.reports.close()
        self._selector.close()

    def _become(self, request: dict, descriptors: dict[int, int]) -> list[str]:
        """Gives a fork its own descriptors, with these numbers, and its folder and environment."""
        above = max(descriptors, default=0) + 1
        moved = {
            number: fcntl.fcntl(each, fcntl.F_DUPFD, above) for number, each in descriptors.items()
        }
        for each in descriptors.values():
            os.close(each)
        for number, each in moved.items():
            os.dup2(each, number)
            os.close(each)
        if 1 in descriptors:  # the server's have another kind of file
            sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.path[1:1] = _module_folders(request["environ"])
        if OWN_INTERPRETERS not in os.environ:
            sys.executable = self._stand_in
        return request["words"]


def _module_folders(environ: Mapping[str, str]) -> list[str]:
    """The folders that PYTHONPATH adds to the path of this interpreter."""
    named = environ.get("PYTHONPATH", "").split(os.pathsep)
    return [each for each in named if each and each not in sys.path]


def main(control: int, listener: int, stand_in: str, imported: list[str]) -> list[str] | None:
    for name in imported:
        importlib.import_module(name)
    if validate := sys.modules.get("omni_proxy.config.validate"):  # each program would compute it
        validate.type_of(sys.modules["omni_proxy.config.schema"].Config)
    # Imported modules are not garbage: a collection in a fork need not visit them, nor copy pages.
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"importing {imported} has started {len(threads) - 1} threads")
    return serve(socket.socket(fileno=control), socket.socket(fileno=listener), stand_in)


def run_program(module: str, words: list[str]) -> NoReturn:
    """Runs the module and ends as the interpreter does, but leaves its memory to the kernel: to
    free what a fork has inherited costs more than most tests."""
    sys.argv = ["omni-proxy", *words]
    status: object = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    threading._shutdown()
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    # A fork returns from `main`, so that its stack has no frames of the fork server.
    arguments = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    if arguments is not None:
        run_program(arguments[0], arguments[1:])
