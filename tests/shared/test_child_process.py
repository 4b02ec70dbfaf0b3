import signal
import subprocess
import sys

import pytest
import trio

from omni_proxy.shared.child_process import (
    exit_text,
    program_argv,
    wait_or_kill,
    wait_or_kill_in_thread,
)

ENDLESS = [sys.executable, "-c", "import signal; signal.pause()"]
QUICK = [sys.executable, "-c", "raise SystemExit(3)"]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "ended with exit status 0"),
        (3, "ended with exit status 3"),
        (-9, "was ended by SIGKILL"),
        (-(signal.SIGRTMIN + 1), f"was ended by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_a_status_as_text(status, text):
    assert exit_text(status) == text


async def test_a_child_that_does_not_end_is_killed(autojump_clock):
    child = await trio.lowlevel.open_process(ENDLESS)
    assert await wait_or_kill(child) == -signal.SIGKILL


async def test_a_child_that_ends_by_itself_has_its_own_status():
    child = await trio.lowlevel.open_process(QUICK)
    await child.wait()
    assert await wait_or_kill(child) == 3


def test_a_thread_kills_a_child_that_does_not_end():
    for command, status in (ENDLESS, -signal.SIGKILL), (QUICK, 3):
        child = subprocess.Popen(command)
        if status == 3:
            child.wait()
        wait_or_kill_in_thread(child, exit_secs=0)
        assert child.returncode == status


def test_the_command_that_restarts_the_program_is_that_of_its_start(monkeypatch, tmp_path):
    assert program_argv() == [sys.executable, "-m", "omni_proxy"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dist/omni-proxy.pyz", "--config", "x"])
    assert program_argv() == [sys.executable, str(tmp_path / "dist/omni-proxy.pyz")]
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert program_argv() == [sys.executable]
