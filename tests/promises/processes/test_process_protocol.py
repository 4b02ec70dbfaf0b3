"""One data-plane process, with the test in the role of the main process."""

from dataclasses import replace

import msgspec
import pytest
import trio

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.accept.listener import Listener, open_socket
from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.fleet.worker import worker_state
from omni_proxy.multiprocess.ipc.messages import (
    ClearCacheCommand,
    DrainCommand,
    ListenCommand,
    MetricsEvent,
    ProcessStats,
    RequestFailedEvent,
    StartCommand,
    StateSnapshot,
    VoiceListMessage,
)
from omni_proxy.multiprocess.process_slot import ProcessHandle
from omni_proxy.multiprocess.reuseport_group import ReuseportGroup
from omni_proxy.multiprocess.shared_keys import KeyCounters
from omni_proxy.multiprocess.shared_memory.sessions import create_sessions
from omni_proxy.multiprocess.shared_memory.worker_counters import SharedCounters
from tests.fleet.entries import entry, fleet_of
from tests.promises.support.clients import client_of, post
from tests.promises.support.fakes import answering, counted, fake_workers, resetting

SILENT_SECS = 0.4
READY = b"GET /ready HTTP/1.1\r\nhost: proxy\r\n\r\n"


class Control:
    """Controls one process; `received` has its messages other than acknowledgements."""

    def __init__(self, tmp_path, urls) -> None:
        self.main_socket = str(tmp_path / "main.sock")
        self.config = parse("")
        self.counters = SharedCounters.create()
        self.key_counters = KeyCounters.create()
        self.key_counters.extend(1)
        self.tables = create_sessions(), create_sessions()
        self.fleet = fleet_of(*(replace(entry("any"), url=url) for url in urls))
        self.handle = ProcessHandle(1)
        self.received: list = []
        self.exit_reason = ""
        self.exited = trio.Event()
        self.loop = loop = EventLoop()
        self.listener = Listener(loop, open_socket("127.0.0.1", 0), lambda sock, peer: None)
        self.port = ReuseportGroup(loop, self.listener)
        self.address = self.listener.address

    def send_snapshot(self, **changes) -> None:
        rows = tuple(
            worker_state(worker, n, n) for n, worker in enumerate(self.fleet.workers, start=1)
        )
        snapshot = StateSnapshot(1, rows, self.config, VoiceListMessage("", None), 0, 1)
        self.handle.send(msgspec.structs.replace(snapshot, **changes))

    async def start(self, nursery) -> None:
        self.handle.send_files(
            StartCommand(1, self.main_socket, SILENT_SECS),
            self.counters.descriptor,
            self.key_counters.descriptor,
            *self.tables,
        )
        self.send_snapshot()
        nursery.start_soon(self._run)
        with trio.fail_after(30):
            await self.handle.wait_acknowledged(2)
        self.handle.send(ListenCommand(1), self.port.listen(0))
        await self.until_acknowledged()

    async def _run(self) -> None:
        self.exit_reason = await self.handle.run(
            lambda link, message: self.received.append(message)
        )
        self.exited.set()

    async def until_acknowledged(self) -> None:
        with trio.fail_after(30):
            await self.handle.wait_acknowledged(self.handle.sent)

    async def until_received(self, kind) -> list:
        with trio.fail_after(30):
            while not (
                messages := [message for message in self.received if isinstance(message, kind)]
            ):
                await trio.sleep(0.01)
        return messages


async def serve_main_process(path: str, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
    sock = trio.socket.socket(trio.socket.AF_UNIX)
    await sock.bind(path)
    sock.listen()

    async def answer(stream: trio.SocketStream) -> None:
        while await stream.receive_some(65536):
            await stream.send_all(counted(b'{"status": "ready"}'))

    await trio.serve_listeners(answer, [trio.SocketListener(sock)], task_status=task_status)


async def until_ready(control) -> bytes:
    """Returns the body of /ready. Repeats snapshots, because they expire after SILENT_SECS."""
    with trio.fail_after(30):
        while True:
            control.send_snapshot(rows=None, config=None)
            await control.until_acknowledged()
            status, body = await ready(control)
            if status == 200:
                return body


async def ready(control) -> tuple[int, bytes]:
    async with client_of(control.address) as client:
        await client.send(READY)
        response = await client.answer("GET")
        return response.status, response.body


@pytest.fixture
async def world(nursery, tmp_path):
    async with fake_workers(answering(counted(b"{}")), resetting) as fakes:
        control = Control(tmp_path, [fake.url for fake in fakes])
        await nursery.start(serve_main_process, control.main_socket)
        await control.start(nursery)
        try:
            yield control
        finally:
            control.handle.kill()
            with trio.fail_after(30):
                await control.exited.wait()
            control.port.close_all()
            control.listener.close()
            control.loop.flush()


async def test_a_process_without_messages_is_not_ready_but_continues_to_serve(world):
    control = world
    assert await until_ready(control) == b'{"status": "ready"}'
    await trio.sleep(2 * SILENT_SECS)
    status, body = await ready(control)
    assert status == 503
    assert b"the main process has been silent" in body
    async with client_of(control.address) as client:
        await client.send(post())
        assert (await client.answer()).status == 200
    await until_ready(control)


async def test_a_process_reports_failures_and_metrics(world):
    control = world
    async with client_of(control.address) as client:
        for _ in range(2):
            await client.send(post())
            assert (await client.answer()).status == 200
    (failed,) = await control.until_received(RequestFailedEvent)
    assert failed.serial == 2
    assert "reset" in failed.error
    tally = (await control.until_received(MetricsEvent))[0]
    assert sum(end.count for series in tally.series for end in series.ends)
    stats = (await control.until_received(ProcessStats))[-1]
    assert stats.counts["accepted"] >= 0
    assert control.counters.row(1)[0] == 0


async def test_a_drained_process_exits_with_status_0_and_reports_everything(world):
    control = world
    async with client_of(control.address) as client:
        await client.send(post())
        assert (await client.answer()).status == 200
        control.handle.send(DrainCommand())
        assert await client.until_closed() == b""
    with trio.fail_after(30):
        await control.exited.wait()
    assert control.exit_reason == "ended with exit status 0"
    tallies = [each for each in control.received if isinstance(each, MetricsEvent)]
    assert sum(e.count for tally in tallies for series in tally.series for e in series.ends) == 1


async def test_no_task_waits_for_the_acknowledgement_of_a_killed_process(world):
    control = world
    control.handle.kill()
    control.handle.send(ClearCacheCommand(1))
    with trio.fail_after(30):
        await control.handle.wait_acknowledged(control.handle.sent)
        await control.exited.wait()
    assert control.exit_reason == "was ended by SIGKILL"
    assert control.handle.send(ClearCacheCommand(1)) == 0
