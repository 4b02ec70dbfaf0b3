import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.shared.watchdog import (
    CHECK_SECS,
    STALL_EVENT,
    STALL_SECS,
    StallTimer,
    Watchdog,
    cpu_wait_secs,
)

PROGRAM = """
import logging, math, re, sys, time, trio
from omni_proxy.shared.watchdog import Watchdog

def {act}

async def main():
    global dog
    dog = Watchdog()
    async with trio.open_nursery() as nursery:
        await nursery.start(dog.run)
        await trio.sleep(0.3)
        print("acts", flush=True)
        act()
        await trio.sleep(1.0)
        print(dog.stalls, dog.longest_turn_secs, flush=True)
        nursery.cancel_scope.cancel()

logging.basicConfig(level="INFO", stream=sys.stderr)
trio.run(main)
"""
SLEEPS = "act(): time.sleep(1.8)"
COMPUTES = """act():
    until = time.thread_time() + 1.8
    while time.thread_time() < until:
        pass
"""
HOLDS_THE_GIL = """act():
    length = 20
    while True:  # the duration depends on the machine
        began = time.thread_time()
        re.match("(a|aa)+$", "a" * length + "b")
        elapsed = time.thread_time() - began
        if elapsed > 1.7:
            until = time.process_time() + 20
            while not dog.stalls and time.process_time() < until:
                pass  # until the watchdog's thread has seen the stall
            return
        # One more byte takes 1.618 times as long.
        length += max(math.ceil(math.log(1.8 / elapsed, 1.618)), 1)
"""


def started(act):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("{act}", act)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("act", [SLEEPS, COMPUTES, HOLDS_THE_GIL], ids=["sleeps", "py", "c"])
def test_a_stall_is_logged_once_with_the_stack_of_the_loop_and_counted(act):
    out, err = started(act).communicate(timeout=90)
    stalls, longest = out.split()[1:]
    assert int(stalls) == err.count(STALL_EVENT) == 1, err
    assert "in act" in err
    assert "MainThread, the event loop" in err
    assert re.search(r"event_loop_resumed stalled=\d", err)
    if act is not SLEEPS:
        assert float(longest) > 1


def test_a_process_that_was_stopped_has_not_stalled():
    process = started("act(): pass")
    assert process.stdout.readline() == "acts\n"
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.5)
    os.kill(process.pid, signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert out.split()[0] == "0"
    assert STALL_EVENT not in err


async def test_the_status_of_a_quiet_loop_is_json_without_a_stall(nursery):
    dog = Watchdog()
    await nursery.start(dog.run)
    body = json.loads(json.dumps(dog.status()))
    assert (body["stalls"], body["last_stall_at"], body["last_stall_secs"]) == (0, None, None)


async def test_the_thread_of_the_watchdog_ends_with_it():
    def watchdog_threads():
        return [thread for thread in threading.enumerate() if thread.name == "watchdog"]

    before = watchdog_threads()
    async with trio.open_nursery() as nursery:
        await nursery.start(Watchdog().run)
        (thread,) = set(watchdog_threads()) - set(before)
        nursery.cancel_scope.cancel()
    await trio.to_thread.run_sync(thread.join, 30)
    assert not thread.is_alive()


async def until_heartbeat(dog, before):
    with trio.fail_after(60):
        while dog.heartbeats == before:
            await trio.lowlevel.checkpoint()


async def test_only_cpu_time_of_the_loop_counts_as_a_long_turn(nursery):
    dog = Watchdog(heartbeat_secs=0.01)
    await nursery.start(dog.run)
    before = dog.heartbeats
    time.sleep(0.3)  # noqa: TID251, ASYNC251  simulates a machine without a free CPU
    await until_heartbeat(dog, before)
    assert dog.longest_turn_secs < 0.25


def test_a_stall_is_reported_once_until_the_next_heartbeat():
    timer = StallTimer(0.0, 0.0)
    reports = [timer.update(now / 4, 0.0, 0) for now in range(1, 13)]
    assert reports == [False] * 3 + [True] + [False] * 8
    assert not timer.update(3.25, 0.0, 1)
    reports = [timer.update(3.25 + now / 4, 0.0, 1) for now in range(1, 5)]
    assert reports == [False, False, False, True]


def test_waiting_for_a_cpu_is_not_a_stall():
    timer = StallTimer(0.0, 0.0)
    starved = [timer.update(now / 4, 0.0, 0, now / 4) for now in range(1, 41)]
    assert starved == [False] * 40
    blocked = [timer.update(10 + now / 4, 0.0, 0, 10.0) for now in range(1, 5)]
    assert blocked == [False, False, False, True]


def test_a_clock_that_is_read_late_causes_no_stall():
    timer = StallTimer(0.0, 0.0)
    # At each second update, half a second passes between the two reads; the loop never gets a CPU.
    updates = [(now / 2, (now + now % 2) / 2) for now in range(1, 41)]
    assert [timer.update(now, 0.0, 0, waited) for now, waited in updates] == [False] * 40


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="not counted by this kernel")
def test_the_kernel_counts_how_long_a_thread_waits_for_a_cpu():
    """Two other busy processes and this thread share one CPU."""
    busy = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"
    cpus = os.sched_getaffinity(0)
    cpu = min(cpus)
    others = [subprocess.Popen([sys.executable, "-c", busy % cpu]) for _ in range(2)]
    try:
        os.sched_setaffinity(0, {cpu})
        before = cpu_wait_secs(threading.get_native_id())
        until = time.monotonic() + 90  # a deadline for a hung test
        while cpu_wait_secs(threading.get_native_id()) < before + 0.05:
            assert time.monotonic() < until
    finally:
        os.sched_setaffinity(0, cpus)
        for each in others:
            each.kill()
            each.wait()


FORKED = """
import os, sys, threading, trio
from omni_proxy.shared import watchdog

async def main():
    read_ids, event = [], threading.Event()
    watchdog.cpu_wait_secs = lambda native_id: read_ids.append(native_id) or event.set() or 0.0
    async with trio.open_nursery() as nursery:
        await nursery.start(watchdog.Watchdog().run)
        await trio.to_thread.run_sync(event.wait, 60)
        nursery.cancel_scope.cancel()
    sys.exit(set(read_ids) != {threading.get_native_id()})

if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
trio.run(main)
"""


def test_in_a_fork_the_watchdog_reads_the_clock_of_the_fork():
    """After a fork, Python's record of the main thread still has the id of the parent's thread."""
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=90, check=False).returncode == 0


def test_the_wait_of_an_unknown_thread_is_zero():
    assert cpu_wait_secs(1 << 30) == 0.0


UPDATES = st.lists(
    st.tuples(st.floats(0.2, 600), st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=40
)


@given(updates=UPDATES)
def test_a_timer_counts_at_most_the_elapsed_time_since_the_last_heartbeat(updates):
    timer = StallTimer(0.0, 0.0)
    now = cpu = waited = 0.0
    beats, quiet = 0, []
    for elapsed, share, waits, beat in updates:
        now, cpu, beats = now + elapsed, cpu + elapsed * share, beats + beat
        waiting = elapsed * (1 - share) * waits
        waited += waiting
        was_reported = timer.reported
        reported = timer.update(now, cpu, beats, waited)
        quiet = [] if beat else [*quiet, (elapsed - waiting, elapsed * share)]
        counted = sum(min(secs, max(2 * CHECK_SECS, used)) for secs, used in quiet)
        assert timer.secs == pytest.approx(counted, abs=1e-3)
        assert timer.secs <= sum(secs for secs, _ in quiet) + 1e-3
        assert reported == (not beat and not was_reported and timer.secs >= STALL_SECS)


async def test_computing_during_startup_is_not_a_long_turn(nursery):
    dog = Watchdog(heartbeat_secs=0.01)
    await nursery.start(dog.run)
    for longest in (0.0, 0.1):
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        if not longest:
            dog.end_startup()
        before = dog.heartbeats
        await until_heartbeat(dog, before)
        assert (dog.longest_turn_secs > 0.1) == bool(longest)
