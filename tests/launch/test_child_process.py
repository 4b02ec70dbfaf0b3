import os
import signal
import socket
import sys

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.launch.child_process import (
    LINE_CHARS,
    HandedReplica,
    OutputLines,
    ParentDeathGuard,
    ReplicaRecord,
)
from tests.processes import until_gone

GUARDED_PROGRAM = """
import sys, trio
from omni_proxy.launch.child_process import ParentDeathGuard

async def main():
    guard = ParentDeathGuard()
    await guard.attach()
    for _ in range(2):
        child = await guard.start(["sleep", "600"], {"PATH": "/usr/bin:/bin"}, print)
        print(child.pid, flush=True)
    await trio.sleep_forever()

trio.run(main)
"""


async def test_a_killed_program_leaves_no_child_behind():
    argv = [sys.executable, "-c", GUARDED_PROGRAM]
    program = await trio.lowlevel.open_process(argv, stdout=-1)
    printed = b""
    while printed.count(b"\n") < 2:
        printed += await program.stdout.receive_some()
    pids = [int(line) for line in printed.split()]
    os.kill(program.pid, signal.SIGKILL)
    await program.wait()
    await program.stdout.aclose()
    for pid in pids:
        await until_gone(pid)


async def test_the_last_output_is_read_after_the_child_has_ended():
    lines = []
    guard = ParentDeathGuard()
    await guard.attach()
    script = "import sys; print('x' * 200_000); print('last line'); sys.exit(4)"
    child = await guard.start([sys.executable, "-c", script], dict(os.environ), lines.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child.forward_output)
        assert await child.wait_exit() == "process ended with exit status 4"
        nursery.cancel_scope.cancel()
    await child.stop()
    await guard.detach()
    assert lines[-1] == "last line"


async def handed_without_output():
    """A running process, and its handover by another program: with an output that can't be
    reopened, like a pipe without /proc."""
    process = await trio.lowlevel.open_process(["sleep", "600"], start_new_session=True)
    with socket.socket() as output:
        descriptors = os.pidfd_open(process.pid), os.dup(output.fileno())
    record = ReplicaRecord(name="local", index=0, pid=process.pid)
    return process, HandedReplica(record, *descriptors)


async def test_a_handed_process_that_cannot_be_adopted_is_ended(caplog):
    process, handed = await handed_without_output()
    with pytest.raises(OSError):
        await ParentDeathGuard().adopt(handed, print)
    assert await process.wait() == -signal.SIGTERM
    assert f"replica_not_resumed pid={process.pid}" in caplog.text
    for descriptor in (handed.pidfd, handed.output):
        with pytest.raises(OSError):
            os.fstat(descriptor)


@given(st.lists(st.text("ab \r\n", max_size=50)), st.data())
def test_lines_do_not_depend_on_the_chunks(parts, data):
    whole = "".join(parts).encode() + b"\n"
    expected = [line.rstrip() for line in whole.decode().replace("\r", "\n").split("\n")]
    lines, split, rest = OutputLines(), [], whole
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        split += lines.feed(rest[:size])
        rest = rest[size:]
    assert split == [line for line in expected if line]


@given(st.binary(max_size=20_000))
def test_lines_are_bounded_and_have_no_control_characters(output):
    for line in OutputLines().feed(output + b"\n"):
        assert len(line) <= LINE_CHARS + len(" [cut]")
        assert not any(char < " " and char != "\t" for char in line)


def test_colours_are_dropped():
    assert OutputLines().feed(b"\x1b[32mINFO\x1b[0m ready\n") == ["INFO ready"]
