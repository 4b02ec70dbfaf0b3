"""Runs the tests in several processes, each a fork of the one that has collected them.

Collecting takes longer than most test files: a worker that collects again, as those of other
plug-ins do, costs as much CPU time as two hundred tests. A fork shares the memory with everything
collected. `tests.schedule` decides which tests stay in one process.
Invariants: the first process runs no test; when a worker crashes, the test that it ran fails, and
its other tests run in another worker. No thread may be started while tests are collected.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest

from tests.schedule import units_of


@dataclass(eq=False)
class Worker:
    """`units`: the indexes of items that it received and has not begun. `running`: the index of the
    present item."""

    pid: int
    connection: Connection
    units: deque[list[int]] = field(default_factory=deque)
    running: int | None = None


class ForkedWorkers:
    """A pytest plug-in. `at_end`: called in each worker after its last test. `served`: sockets,
    each with a function that the first process calls whenever the socket is readable."""

    def __init__(
        self,
        count: int,
        at_end: Callable[[], None],
        *served: tuple[socket.socket, Callable[[], None]],
    ) -> None:
        self._count = count
        self._at_end = at_end
        self._served = served
        self._waiting: deque[list[int]] = deque()
        self._workers: list[Worker] = []
        self._started = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            raise pytest.UsageError(f"collecting the tests has started {threads - 1} threads")
        session.config._tmp_path_factory.getbasetemp()
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        terminal.showfspath = False  # results of several files are interleaved
        self._waiting.extend(units_of([item.nodeid for item in session.items]))
        try:
            for _ in range(min(self._count, len(self._waiting))):
                self._fork(session)
            self._follow(session)
        finally:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        return True

    def _fork(self, session: pytest.Session) -> None:
        own_end, worker_end = Pipe()
        self._started += 1
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            own_end.close()
            for worker in self._workers:
                worker.connection.close()
            for served, _ in self._served:
                served.close()
            self._work(session, worker_end)
        worker_end.close()
        self._workers.append(Worker(pid, own_end))

    def _follow(self, session: pytest.Session) -> None:
        while self._workers:
            sockets = [served for served, _ in self._served]
            ready = wait([*sockets, *(worker.connection for worker in self._workers)])
            for served, handle in self._served:
                if served in ready:
                    handle()
            for worker in [each for each in self._workers if each.connection in ready]:
                self._receive(session, worker)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)

    def _receive(self, session: pytest.Session, worker: Worker) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._on_exit(session, worker)
            return
        if kind == "next":
            unit = self._waiting.popleft() if self._waiting else []
            worker.units.append(unit)
            worker.connection.send(unit)
        elif kind == "begin":
            worker.running = value
            while worker.units and not worker.units[0]:
                worker.units.popleft()
            worker.units[0].remove(value)
        else:
            self._report(session, value)

    def _report(self, session: pytest.Session, data: dict[str, Any]) -> None:
        config = session.config
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        config.hook.pytest_runtest_logreport(report=report)

    def _on_exit(self, session: pytest.Session, worker: Worker) -> None:
        """Handles the end of a worker: if it ended before its last test, the present test failed."""
        self._workers.remove(worker)
        worker.connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if worker.running is None or (status == 0 and not any(worker.units)):
            return
        item = session.items[worker.running]
        text = f"the process of this test ended with status {status}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        self._waiting.extendleft(unit for unit in reversed(worker.units) if unit)
        if self._waiting:
            self._fork(session)

    def _work(self, session: pytest.Session, connection: Connection) -> NoReturn:
        """Runs in the fork."""
        status = 1
        try:
            self._settle_in(session, connection)
            self._run_units(session, connection)
            self._at_end()
            status = 0
        except KeyboardInterrupt:
            pass
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _settle_in(self, session: pytest.Session, connection: Connection) -> None:
        """Gives the fork its own files: for captured output, and the folder of temporary files."""
        config = session.config
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture.is_globally_capturing():
            capture.stop_global_capturing()
            capture.start_global_capturing()
        config.pluginmanager.unregister(config.pluginmanager.getplugin("terminalreporter"))
        config.pluginmanager.register(_Sender(config, connection))
        factory = config._tmp_path_factory
        factory._basetemp = factory.getbasetemp() / f"p{self._started}"
        factory._basetemp.mkdir(mode=0o700)

    def _run_units(self, session: pytest.Session, connection: Connection) -> None:
        items = session.items

        def next_unit() -> list[int]:
            connection.send(("next", None))
            unit: list[int] = connection.recv()
            return unit

        unit = next_unit()
        while unit:
            following: list[int] = []
            for index, after in zip(unit, [*unit[1:], None], strict=True):
                if after is None:  # keeps fixtures of the session for the next unit
                    following = next_unit()
                    after = following[0] if following else None
                connection.send(("begin", index))
                item = items[index]
                item.config.hook.pytest_runtest_protocol(
                    item=item, nextitem=None if after is None else items[after]
                )
            unit = following


class _Sender:
    """Sends what a worker reports to the first process."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._connection.send(("report", data))
