import fcntl
import json
import logging
import os
import pty
import sys
import threading
import tty

import pytest

from omni_proxy.telemetry.logs import WRITER_THREAD, NonBlockingHandler, configure

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def test_text_lines_have_level_and_logger(capsys, monkeypatch):
    configure("info", "text")
    logging.getLogger("omni_proxy.dataplane").info("hello %s", "world")
    logging.getLogger("omni_proxy.dataplane").debug("hidden")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO    omni_proxy.dataplane: hello world")


def test_json_lines_are_one_object_each_even_with_a_traceback(capsys):
    configure("debug", "json")
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        logging.getLogger("omni_proxy.server").exception("failed")
    body = json.loads(capsys.readouterr().err)
    assert (body["level"], body["logger"], body["message"]) == (
        "error",
        "omni_proxy.server",
        "failed",
    )
    assert "two\nlines" in body["traceback"]


def test_configure_may_be_called_again_and_leaves_one_handler(capsys):
    before = len(logging.getLogger().handlers)
    configure("info", "text")
    configure("warning", "json")
    assert len(logging.getLogger().handlers) == before + 1
    logging.getLogger("omni_proxy").info("hidden")
    logging.getLogger("omni_proxy").warning("shown")
    assert json.loads(capsys.readouterr().err)["message"] == "shown"


def test_probes_do_not_fill_the_log(capsys):
    configure("info", "text")
    logging.getLogger("httpx").info("HTTP Request: GET /health")
    assert capsys.readouterr().err == ""


def test_the_log_is_written_to_stderr(capsys):
    configure("info", "text")
    logging.getLogger("omni_proxy").info("x")
    assert capsys.readouterr().out == ""
    assert sys.stderr is not None


@pytest.mark.parametrize("format_", ["text", "json"])
def test_secrets_of_queries_and_control_characters_are_not_logged(capsys, format_):
    configure("info", format_)
    logging.getLogger("omni_proxy").error("GET http://w/a?api%%5Fkey=%s\x9b\u202e failed", "abc")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert "GET http://w/a?api%5Fkey=*** failed" in line


class FakeLineLog:
    """A stand-in for LineLog that keeps lines in memory."""

    def __init__(self):
        self.on, self.kept = True, []

    def write(self, record):
        self.kept.append(record.decode())


def test_a_file_gets_the_same_lines_from_its_configuration_on(capsys):
    lines = FakeLineLog()
    configure("info", "text")
    logging.getLogger("omni_proxy").info("early")
    configure("info", "text", lines)
    configure("info", "text", lines)
    logging.getLogger("omni_proxy").info("key=%s", "url?api_key=abc")
    (line,) = lines.kept
    assert line.endswith('INFO    omni_proxy: key="url?api_key=***"')
    assert capsys.readouterr().err.splitlines()[1] == line
    configure("info", "json")
    logging.getLogger("omni_proxy").info("as json")
    assert json.loads(lines.kept[1])["message"] == "as json"
    lines.on = False
    logging.getLogger("omni_proxy").info("only here")
    assert len(lines.kept) == 2


def test_errors_of_the_log_file_are_not_written_to_it():
    lines = FakeLineLog()
    configure("info", "text", lines)
    logging.getLogger("omni_proxy.telemetry.line_log").warning("cannot write")
    assert lines.kept == []


PIPE_BYTES = 4096


@pytest.fixture
def small_pipe():
    read_fd, write_fd = os.pipe()
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with os.fdopen(read_fd, "rb", buffering=0) as reader, os.fdopen(write_fd, "w") as stream:
        yield reader, stream


def log(handler, text):
    handler.handle(logging.LogRecord("a", logging.INFO, "", 0, text, None, None))


def writer_threads():
    return [thread for thread in threading.enumerate() if thread.name == WRITER_THREAD]


def read_until(reader, last):
    received = b""
    while not received.endswith(last + b"\n"):
        received += reader.read(65536)
    return received.decode().splitlines()


def test_a_line_is_written_by_the_calling_thread_if_that_cannot_block(small_pipe):
    reader, stream = small_pipe
    threads = threading.active_count()
    log(NonBlockingHandler(stream), "now")
    assert threading.active_count() <= threads
    assert reader.read(100) == b"now\n"


def test_a_stalled_reader_blocks_no_caller_and_loses_no_line(small_pipe):
    reader, stream = small_pipe
    handler = NonBlockingHandler(stream)
    lines = [f"line {number:04}" for number in range(2000)]
    for line in lines:
        log(handler, line)
    assert read_until(reader, lines[-1].encode()) == lines
    for thread in writer_threads():
        thread.join()
    log(handler, "next")
    assert read_until(reader, b"next") == ["next"]


def test_a_line_longer_than_the_pipe_is_written_completely(small_pipe):
    reader, stream = small_pipe
    handler = NonBlockingHandler(stream)
    long = "x" * (3 * PIPE_BYTES)
    log(handler, long)
    log(handler, "next")
    assert read_until(reader, b"next") == [long, "next"]


def test_lines_beyond_the_bound_are_dropped_and_counted(small_pipe):
    reader, stream = small_pipe
    handler = NonBlockingHandler(stream, max_queue_bytes=6000)
    for number in range(2000):
        log(handler, f"line {number:04}")
    received = []
    reading = threading.Thread(
        target=lambda: received.extend(iter(lambda: reader.read(65536), b""))
    )
    reading.start()
    handler.close()
    stream.close()
    reading.join()
    lines = b"".join(received).decode().splitlines()
    dropped = [
        int(line.partition("=")[2]) for line in lines if line.startswith("log_lines_dropped")
    ]
    assert dropped
    assert len(lines) - len(dropped) + sum(dropped) == 2000


def test_a_terminal_that_is_not_read_blocks_no_caller():
    master, terminal = pty.openpty()
    try:
        tty.setraw(terminal)
        with os.fdopen(terminal, "w", closefd=False) as stream:
            handler = NonBlockingHandler(stream)
            for number in range(20_000):  # far more than a terminal holds
                log(handler, f"line {number:06}")
            assert writer_threads()
            received = b""
            while b"line 019999" not in received:
                received = received[-100:] + os.read(master, 65536)
            handler.close()
    finally:
        os.close(master)
        os.close(terminal)


def test_a_full_disk_or_a_closed_pipe_only_loses_lines(small_pipe):
    with open("/dev/full", "w") as full:
        handler = NonBlockingHandler(full)
        log(handler, "short")
        log(handler, "long" * 2000)
        handler.close()
    reader, stream = small_pipe
    reader.close()
    handler = NonBlockingHandler(stream)
    log(handler, "short")
    log(handler, "long" * 2000)
    handler.close()
    assert not writer_threads()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork while a thread runs
def test_a_forked_child_writes_its_own_lines_and_none_of_its_parent(small_pipe):
    reader, stream = small_pipe
    handler = NonBlockingHandler(stream)
    lines = [f"line {number:04}\n" for number in range(1000)]
    for line in lines:
        log(handler, line.rstrip())
    child = os.fork()
    if not child:
        log(handler, "of the child")
        handler.close()
        os._exit(0)  # the only way to end a forked child without the parent's cleanup
    own, expected = b"of the child\n", "".join(lines).encode()
    received = b""
    while len(received) < len(expected) + len(own):
        received += reader.read(65536)
    assert os.waitpid(child, 0)[1] == 0
    for thread in writer_threads():
        thread.join()
    stream.close()
    received += reader.read(65536)  # the end, as nobody has written more
    assert received.replace(own, b"") == expected
