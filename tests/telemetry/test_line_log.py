import logging
import resource
import shutil
import sys

import trio

from omni_proxy.telemetry.line_log import LineLog


async def run_and_flush(log, action=lambda: None):
    """Run the log, call `action`, and stop the log, which writes all accepted lines."""
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        action()
        nursery.cancel_scope.cancel()


async def wait_until(holds):
    with trio.fail_after(30):
        while not holds():  # noqa: ASYNC110  # a thread writes the file, without an event
            await trio.sleep(0.01)


async def test_the_folder_of_a_log_is_created(tmp_path):
    path = tmp_path / "new" / "route.log"
    log = LineLog(str(path))

    def action():
        log.write(b"one")
        log.write(b"two")

    await run_and_flush(log, action)
    assert path.read_bytes() == b"one\ntwo\n"


async def test_lines_are_appended_to_an_existing_file(tmp_path):
    path = tmp_path / "route.log"
    path.write_bytes(b"old\n")
    log = LineLog(str(path))
    await run_and_flush(log, lambda: log.write(b"new"))
    assert path.read_bytes() == b"old\nnew\n"


async def test_after_a_rotation_a_new_file_is_opened(tmp_path):
    path = tmp_path / "route.log"
    log = LineLog(str(path))
    await run_and_flush(log, lambda: log.write(b"one"))
    path.rename(tmp_path / "route.log.1")
    await run_and_flush(log, lambda: log.write(b"two"))
    assert path.read_bytes() == b"two\n"


async def test_a_deleted_folder_is_created_again_without_losing_a_line(tmp_path):
    path = tmp_path / "logs" / "of today" / "route.log"
    log = LineLog(str(path))
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        for line in (b"one", b"two"):
            shutil.rmtree(tmp_path / "logs")
            log.write(line)
            await wait_until(lambda: path.exists() and path.read_bytes() == line + b"\n")  # noqa: B023
        nursery.cancel_scope.cancel()
    assert log.failed == 0


async def test_a_folder_that_cannot_be_created_is_logged_once(tmp_path, caplog):
    folder = tmp_path / "logs"
    folder.write_text("a file where a folder should be")
    path = folder / "route.log"
    log = LineLog(str(path))
    with caplog.at_level(logging.WARNING):
        async with trio.open_nursery() as nursery:
            await nursery.start(log.run)
            for count in (1, 2):
                log.write(b"lost")
                await wait_until(lambda: log.failed == count)  # noqa: B023
            folder.unlink()
            log.write(b"kept")
            await wait_until(lambda: path.exists() and path.read_bytes() == b"kept\n")
            nursery.cancel_scope.cancel()
    assert log.failed == 2
    assert len(caplog.records) == 1


async def write_partially(log, path):
    """Leaves an incomplete line in the file of a running log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # a full disk, in one file
    try:
        for line in (b"first", b"second", b"third"):
            log.write(line)
        await wait_until(lambda: log.failed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (path.read_bytes(), log.failed) == (b"first\nseco", 2)


async def test_after_a_partial_write_the_next_line_is_complete(tmp_path):
    path = tmp_path / "route.log"
    log = LineLog(str(path))
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        await write_partially(log, path)
        for line in (b"fourth", b"fifth"):
            log.write(line)
            await wait_until(lambda: path.read_bytes().endswith(line + b"\n"))  # noqa: B023
        nursery.cancel_scope.cancel()
    assert path.read_bytes() == b"first\nseco\nfourth\nfifth\n"


async def test_a_new_file_after_a_partial_write_has_no_empty_line(tmp_path):
    path = tmp_path / "route.log"
    log = LineLog(str(path))
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        await write_partially(log, path)
        path.unlink()
        log.write(b"new")
        nursery.cancel_scope.cancel()
    assert path.read_bytes() == b"new\n"


async def test_lines_beyond_the_queue_are_dropped_and_counted(tmp_path):
    path = tmp_path / "route.log"
    log = LineLog(str(path), max_queue_bytes=10)
    for _ in range(5):
        log.write(b"12345")
    assert log.dropped == 3
    await run_and_flush(log)
    assert path.read_bytes() == b"12345\n12345\n"


async def test_a_log_that_is_off_accepts_and_counts_nothing(tmp_path):
    log = LineLog("off")
    assert not log.on
    log.write(b"x")
    await run_and_flush(log)
    assert log.status() == {"target": "off", "dropped": 0, "failed": 0}


async def test_the_target_can_be_changed_while_the_log_runs(tmp_path):
    first, second = tmp_path / "first", tmp_path / "sub" / "second"
    log = LineLog(str(first))

    def action():
        log.retarget(str(second))
        log.write(b"x")

    await run_and_flush(log, action)
    assert (first.read_bytes(), second.read_bytes()) == (b"", b"x\n")


async def test_a_dash_is_stdout(capfdbinary, monkeypatch):
    log = LineLog("-")
    await run_and_flush(log, lambda: log.write(b"seen"))
    assert capfdbinary.readouterr().out == b"seen\n"


async def test_a_closed_stdout_only_loses_lines(monkeypatch):
    class Closed:
        class buffer:
            @staticmethod
            def write(blob):
                raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(sys, "stdout", Closed)
    log = LineLog("-")
    await run_and_flush(log, lambda: log.write(b"lost"))
    assert log.failed == 1


async def test_lines_are_flushed_while_the_log_runs(tmp_path):
    path = tmp_path / "route.log"
    log = LineLog(str(path))
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        for expected in (b"a\n", b"a\nb\n"):
            log.write(expected[-2:-1])
            await wait_until(lambda: path.read_bytes() == expected)  # noqa: B023
        nursery.cancel_scope.cancel()


async def test_lines_written_before_the_log_runs_are_kept(tmp_path):
    log = LineLog(str(tmp_path / "route.log"))
    log.write(b"early")
    await run_and_flush(log, lambda: log.write(b"late"))
    assert (tmp_path / "route.log").read_bytes() == b"early\nlate\n"
