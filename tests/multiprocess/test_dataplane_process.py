"""How a data-plane process handles the main process's commands; both run in this process."""

import os
import socket
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from omni_proxy.config.parse import parse
from omni_proxy.fleet.worker import worker_state
from omni_proxy.multiprocess.dataplane_process import DataPlaneProcess, LineBatches
from omni_proxy.multiprocess.ipc.channel import IpcChannel
from omni_proxy.multiprocess.ipc.messages import (
    ClearCacheCommand,
    LogLinesEvent,
    ProcessCommand,
    ProcessEvent,
    StartCommand,
    StateSnapshot,
    VoiceListMessage,
)
from omni_proxy.multiprocess.replication import ReportHandler
from omni_proxy.multiprocess.shared_keys import KeyCounters
from omni_proxy.multiprocess.shared_memory.sessions import create_sessions
from omni_proxy.multiprocess.shared_memory.worker_counters import SharedCounters
from tests.fleet.entries import entry, fleet_of


@pytest.fixture
async def process(logging_as_it_was, nursery):
    """A data-plane process that has received two workers, with the serials 1 and 2."""
    main_socket, process_socket = socket.socketpair()
    control = IpcChannel(main_socket, msgspec.msgpack.Decoder(ProcessEvent))
    dataplane = IpcChannel(process_socket, msgspec.msgpack.Decoder(ProcessCommand))
    tables = [create_sessions() for _ in range(2)]
    start = StartCommand(1, "/nowhere", 5.0)
    keys = KeyCounters.create().descriptor
    control.send(start, [SharedCounters.create().descriptor, keys, *tables])
    for table in tables:
        os.close(table)
    nursery.start_soon(control.run_writer)
    assert await dataplane.receive() == [start]
    fleet = fleet_of(entry("a"), entry("b"))
    rows = tuple(
        worker_state(worker, serial, serial) for serial, worker in enumerate(fleet.workers, start=1)
    )
    yield DataPlaneProcess(
        start, StateSnapshot(1, rows, parse(""), VoiceListMessage("", None), 0, 1), dataplane
    )
    control.close()
    dataplane.close()


async def test_a_clear_cache_command_for_an_unknown_worker_is_ignored(process):
    cleared = []
    process.fleet.watch_cache_cleared(cleared.append)
    process.take(ClearCacheCommand(2))
    process.take(ClearCacheCommand(3))
    assert [worker.url for worker in cleared] == ["http://b:1"]


def test_dropped_lines_are_counted_for_each_log():
    batches = LineBatches(max_bytes=10)
    assert batches.take() is None
    for count, sink in enumerate((batches.access, batches.route, batches.spans), start=1):
        sink.write(b"fits")
        for _ in range(count):
            sink.write(b"does not fit")
    assert batches.take() == LogLinesEvent([b"fits"], [b"fits"], [b"fits"], (1, 2, 3))
    batches.access.write(b"again")
    assert batches.take() == LogLinesEvent([b"again"], [], [], (0, 0, 0))


def test_the_main_process_adds_up_dropped_lines_for_each_log():
    logs = {name: SimpleNamespace(dropped=0, write=None) for name in ("access_log", "route_log")}
    instruments = SimpleNamespace(logs=logs, spans=SimpleNamespace(dropped=0, write=None))
    handler = ReportHandler(None, None, None, instruments, None, Counter(), Counter())
    for _ in range(2):
        handler.on_event(None, LogLinesEvent([], [], [], (1, 2, 3)))
    sinks = *logs.values(), instruments.spans
    assert [sink.dropped for sink in sinks] == [2, 4, 6]
