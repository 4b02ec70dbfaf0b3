import os
import signal
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from omni_proxy.config.schema import ServerConfig
from omni_proxy.signals import SignalHandler


class Program:
    """A program with a signal handler, which records its calls in order."""

    def __init__(self, **server):
        self.calls = []
        self.idle = trio.Event()
        self.config = ServerConfig(**server)
        self.handed_over = trio.Event()
        self.handler = SignalHandler(
            server_config=lambda: self.config,
            request_reload=lambda why: self.calls.append(f"reload {why}"),
            upgrades=SimpleNamespace(
                opened=trio.Event(),
                request=self.record_call("upgrade"),
                outgoing=SimpleNamespace(stop=self.record_call("stop upgrade")),
                wait_reported=trio.lowlevel.checkpoint,
            ),
            handed_over=self.handed_over,
            decline_takeover=None,
            service_manager=SimpleNamespace(stopping=self.record_call("stopping")),
            process_manager=SimpleNamespace(
                begin_drain=self.record_call("drain"), drained=self.idle.wait
            ),
            picker=lambda: SimpleNamespace(
                begin_drain=self.record_call("drain picker"), drained=trio.lowlevel.checkpoint
            ),
            counts=lambda: {"connections": 3},
        )

    def record_call(self, call):
        return lambda: self.calls.append(call)


@pytest.fixture
async def running(nursery):
    """Starts programs; `ended` of each is set when its root scope has been cancelled."""

    async def start(**server):
        program = Program(**server)
        program.scope, program.ended = trio.CancelScope(), trio.Event()

        async def run():
            with program.scope:
                await program.handler.run(program.scope)
            program.ended.set()

        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        return program

    return start


async def send(number):
    os.kill(os.getpid(), number)
    await trio.testing.wait_all_tasks_blocked()


async def test_sighup_reloads_and_sigusr2_upgrades(running):
    program = await running()
    await send(signal.SIGHUP)
    await send(signal.SIGUSR2)
    assert program.calls == ["reload SIGHUP", "upgrade"]
    assert not program.handler.leaving


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains_and_the_program_ends_when_idle(running, number):
    program = await running()
    await send(number)
    assert program.calls == ["stopping", "stop upgrade", "drain", "drain picker"]
    assert (program.handler.leaving, program.ended.is_set()) == (True, False)
    program.idle.set()
    await program.ended.wait()


async def test_a_second_signal_aborts(running, caplog):
    program = await running()
    await send(signal.SIGTERM)
    await send(signal.SIGINT)
    await program.ended.wait()
    assert "shutdown_aborted signal=SIGINT" in caplog.text


async def test_a_drain_ends_after_its_timeout(running, caplog, autojump_clock):
    program = await running(drain_timeout_secs=7.0, ready_off_secs=2.0)
    began = trio.current_time()
    await send(signal.SIGTERM)
    await program.ended.wait()
    assert trio.current_time() - began == pytest.approx(9.0)
    assert "drain_timeout aborted_connections=3" in caplog.text


async def test_after_an_upgrade_the_program_ends_with_its_last_connection(running):
    program = await running()
    program.handed_over.set()
    await trio.testing.wait_all_tasks_blocked()
    assert (program.handler.leaving, program.ended.is_set()) == (True, False)
    program.idle.set()
    await program.ended.wait()
    assert program.calls == ["drain picker"]
