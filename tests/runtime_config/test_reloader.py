from types import SimpleNamespace

import pytest
import trio
import trio.lowlevel
import trio.testing
from watchfiles._rust_notify import WatchfilesRustInternalError

from omni_proxy.runtime_config.reloader import EMPTY_SETTLE_SECS, SETTLE_SECS, Reloader
from omni_proxy.system.files import file_signature


class FakeConfigStore(SimpleNamespace):
    """Records the source of each reload and the content of the file at that time."""

    async def reload(self, source):
        if self.gate is not None:
            await self.gate.wait()
        self.reloads.append((source, self.file.read_text() if self.file else None))
        self.reloaded.set()
        self.reloaded = trio.Event()


def fake_config_store(file) -> FakeConfigStore:
    loaded_signature = file_signature(file) if file else None
    return FakeConfigStore(
        file=file, loaded_signature=loaded_signature, reloads=[], gate=None, reloaded=trio.Event()
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "proxy.toml"
    path.write_text("one")
    return path


async def until(config_store, holds):
    with trio.fail_after(30):
        while not holds(config_store.reloads):
            await config_store.reloaded.wait()


async def test_an_edit_is_read_once_the_file_has_settled(nursery, file):
    config_store = fake_config_store(file)
    await nursery.start(Reloader(config_store).run)
    file.write_text("two")
    await until(config_store, lambda reloads: reloads)
    assert config_store.reloads == [("file", "two")]
    nursery.cancel_scope.cancel()


async def test_without_a_watch_the_file_is_polled_and_one_line_is_logged(
    nursery, file, caplog, autojump_clock
):
    def no_watch(*_, **__):
        raise WatchfilesRustInternalError("Too many open files (os error 24)")

    config_store = fake_config_store(file)
    await nursery.start(Reloader(config_store, watch=no_watch).run)
    await trio.sleep(200)  # the watch is tried again, and fails again
    file.write_text("two")
    await until(config_store, lambda reloads: reloads)
    assert config_store.reloads == [("file", "two")]
    (line,) = caplog.messages
    assert "config_watch_failed" in line
    assert "Too many open files" in line
    nursery.cancel_scope.cancel()


async def idle_watch(*_, **__):
    """Reports nothing."""
    await trio.sleep_forever()
    yield


async def test_a_reload_waits_until_the_file_stops_changing(nursery, file, autojump_clock):
    config_store = fake_config_store(file)
    reloader = Reloader(config_store, watch=idle_watch)
    await nursery.start(reloader.run)
    started_at = trio.current_time()
    reloader.request_reload("SIGHUP")
    # An empty file is given more time: the last edit is half a second after it was emptied.
    for text, at in ("first edit", 0.05), ("second", 0.15), ("", 0.25), ("whole text", 0.75):
        await trio.sleep_until(started_at + at)
        file.write_text(text)
    await until(config_store, lambda reloads: reloads)
    assert config_store.reloads == [("SIGHUP", "whole text")]
    elapsed = trio.current_time() - started_at
    assert elapsed == pytest.approx(3 * SETTLE_SECS + EMPTY_SETTLE_SECS + SETTLE_SECS)
    nursery.cancel_scope.cancel()


async def test_an_edit_during_startup_is_read(nursery, file):
    config_store = fake_config_store(file)
    file.write_text("meanwhile")
    await nursery.start(Reloader(config_store).run)
    await until(config_store, lambda reloads: reloads)
    assert config_store.reloads == [("file", "meanwhile")]
    nursery.cancel_scope.cancel()


async def test_a_signal_during_an_edit_waits_until_the_edit_is_finished(
    file, nursery, autojump_clock
):
    config_store = fake_config_store(file)
    reloader = Reloader(config_store, watch=idle_watch)
    await nursery.start(reloader.run)
    file.write_text("")
    reloader.request_reload("SIGHUP")
    await trio.sleep(EMPTY_SETTLE_SECS - 0.01)
    file.write_text("whole")
    await until(config_store, lambda reloads: reloads)
    assert config_store.reloads == [("SIGHUP", "whole")]
    nursery.cancel_scope.cancel()


async def test_changes_of_other_files_cause_no_reload(nursery, file):
    config_store = fake_config_store(file)
    reloader = Reloader(config_store)
    await nursery.start(reloader.run)
    (file.parent / "access.log").write_text("a line")
    reloader.request_reload("SIGHUP")
    await until(config_store, lambda reloads: reloads)
    file.write_text("two")
    await until(config_store, lambda reloads: len(reloads) == 2)
    assert [source for source, _ in config_store.reloads] == ["SIGHUP", "file"]
    nursery.cancel_scope.cancel()


async def test_requests_before_a_reload_begins_are_merged(nursery, autojump_clock):
    config_store = fake_config_store(None)
    config_store.gate = trio.Event()
    reloader = Reloader(config_store)
    await nursery.start(reloader.run)
    reloader.request_reload("first")
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(5):
        reloader.request_reload("SIGHUP")
    config_store.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert [source for source, _ in config_store.reloads] == ["first", "SIGHUP"]
    nursery.cancel_scope.cancel()


async def test_a_restarted_reloader_continues(file):
    config_store = fake_config_store(file)
    reloader = Reloader(config_store)
    for text in ("two", "three"):
        async with trio.open_nursery() as nursery:
            await nursery.start(reloader.run)
            file.write_text(text)
            await until(config_store, lambda reloads: reloads[-1:] == [("file", text)])  # noqa: B023
            nursery.cancel_scope.cancel()
