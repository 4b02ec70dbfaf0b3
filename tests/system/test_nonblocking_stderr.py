import fcntl
import logging
import os
import pty
import threading
import tty

import pytest

from omni_proxy.system import nonblocking_stderr
from omni_proxy.system.nonblocking_stderr import NonBlockingHandler

PIPE_BYTES = 4096


@pytest.fixture
def small_pipe():
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "w") as stream:
        yield reader, stream


def say(writer, text):
    writer.handle(logging.LogRecord("a", logging.INFO, "", 0, text, None, None))


def read_until(reader, last):
    got = b""
    while not got.endswith(last + b"\n"):
        got += reader.read(65536)
    return got.decode().splitlines()


def test_what_can_leave_leaves_in_the_callers_turn(small_pipe):
    reader, stream = small_pipe
    threads = threading.active_count()
    say(NonBlockingHandler(stream), "now")
    assert threading.active_count() <= threads
    assert reader.read(100) == b"now\n"


def test_nobody_waits_for_a_reader_that_stalls_and_no_line_is_lost_or_out_of_order(small_pipe):
    reader, stream = small_pipe
    writer = NonBlockingHandler(stream)
    said = [f"line {number:04}" for number in range(2000)]
    for line in said:
        say(writer, line)
    assert read_until(reader, said[-1].encode()) == said
    carrier = writer._carrier
    if carrier is not None:
        carrier.join(5)
    say(writer, "and on")
    assert read_until(reader, b"and on") == ["and on"]


def test_a_line_that_no_pipe_takes_at_once_goes_whole(small_pipe):
    reader, stream = small_pipe
    writer = NonBlockingHandler(stream)
    long = "x" * (3 * PIPE_BYTES)
    say(writer, long)
    say(writer, "behind it")
    assert read_until(reader, b"behind it") == [long, "behind it"]


def test_past_the_bound_lines_are_lost_which_is_told(small_pipe, monkeypatch):
    monkeypatch.setattr(nonblocking_stderr, "QUEUE_BYTES", 6000)
    reader, stream = small_pipe
    writer = NonBlockingHandler(stream)
    for number in range(2000):
        say(writer, f"line {number:04}")
    got = []
    reading = threading.Thread(target=lambda: got.extend(iter(lambda: reader.read(65536), b"")))
    reading.start()
    writer.close()
    stream.close()
    reading.join()
    told = b"".join(got).decode().splitlines()
    lost = [int(line.split()[0]) for line in told if line.endswith("nobody took them")]
    assert lost
    assert len(told) - len(lost) + sum(lost) == 2000


def test_a_terminal_that_nobody_reads_holds_up_nobody():
    leading, following = pty.openpty()
    try:
        tty.setraw(following)
        with os.fdopen(following, "w", closefd=False) as stream:
            writer = NonBlockingHandler(stream)
            for number in range(20_000):  # far more than a terminal holds
                say(writer, f"line {number:06}")
            assert writer._carrier is not None
            got = b""
            while b"line 019999" not in got:
                got = got[-100:] + os.read(leading, 65536)
            writer.close()
    finally:
        os.close(leading)
        os.close(following)


def test_a_full_disk_and_a_reader_that_is_gone_cost_lines_only(small_pipe):
    with open("/dev/full", "w") as full:
        writer = NonBlockingHandler(full)
        say(writer, "short")
        say(writer, "long" * 2000)
        writer.close()
    reader, stream = small_pipe
    reader.close()
    writer = NonBlockingHandler(stream)
    say(writer, "short")
    say(writer, "long" * 2000)
    writer.close()
    assert writer._carrier is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside a thread is meant
def test_a_forked_child_says_none_of_its_parents_lines(small_pipe):
    reader, stream = small_pipe
    writer = NonBlockingHandler(stream)
    for number in range(1000):
        say(writer, f"line {number:04}")
    child = os.fork()
    if not child:
        writer.close()
        os._exit(bool(writer._waiting or writer._carrier))
    assert os.waitpid(child, 0)[1] == 0
    assert len(read_until(reader, b"line 0999")) == 1000
