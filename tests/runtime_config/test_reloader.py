from types import SimpleNamespace

import pytest
import trio
import trio.lowlevel
import trio.testing
from watchfiles._rust_notify import WatchfilesRustInternalError

from omni_proxy.runtime_config import reloader as reloading
from omni_proxy.runtime_config.reloader import Reloader
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
    nursery, file, monkeypatch, caplog, autojump_clock
):
    def no_watch(*_, **__):
        raise WatchfilesRustInternalError("Too many open files (os error 24)")

    monkeypatch.setattr(reloading, "awatch", no_watch)
    config_store = fake_config_store(file)
    await nursery.start(Reloader(config_store).run)
    await trio.sleep(200)  # the watch is tried again, and fails again
    file.write_text("two")
    await until(config_store, lambda reloads: reloads)
    assert config_store.reloads == [("file", "two")]
    (line,) = caplog.messages
    assert "config_watch_failed" in line
    assert "Too many open files" in line
    nursery.cancel_scope.cancel()


async def test_a_reload_waits_until_the_file_stops_changing(file, monkeypatch):
    times = iter([(1, 1, 1), (2, 2, 1), (3, 0, 1), (4, 4, 1), (4, 4, 1)])
    monkeypatch.setattr(reloading, "file_signature", lambda _: next(times))
    pauses = []

    async def pause(secs):
        pauses.append(secs)

    monkeypatch.setattr(trio, "sleep", pause)
    assert await Reloader(fake_config_store(None))._wait_settled(file) == (4, 4, 1)
    assert pauses == [reloading.SETTLE_SECS] * 2 + [reloading.EMPTY_SETTLE_SECS] + [
        reloading.SETTLE_SECS
    ]


async def test_an_edit_during_startup_is_read(nursery, file):
    config_store = fake_config_store(file)
    file.write_text("meanwhile")
    await nursery.start(Reloader(config_store).run)
    await until(config_store, lambda reloads: reloads)
    assert config_store.reloads == [("file", "meanwhile")]
    nursery.cancel_scope.cancel()


async def test_a_signal_during_an_edit_waits_until_the_edit_is_finished(file, nursery, monkeypatch):
    config_store = fake_config_store(file)
    reloader = Reloader(config_store)

    async def idle(_):
        await trio.sleep_forever()

    async def finish_edit(_):
        if not file.read_text():
            file.write_text("whole")
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(reloader, "_watch", idle)
    await nursery.start(reloader.run)
    monkeypatch.setattr(reloading.trio, "sleep", finish_edit)
    file.write_text("")
    reloader.request_reload("SIGHUP")
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
