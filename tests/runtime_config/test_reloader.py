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
    """Remembers who asked, and what the file held then."""

    async def reload(self, source):
        if self.gate is not None:
            await self.gate.wait()
        self.asked.append((source, self.file.read_text() if self.file else None))
        self.heard.set()
        self.heard = trio.Event()


def fake_config_store(file) -> FakeConfigStore:
    loaded_signature = file_signature(file) if file else None
    return FakeConfigStore(
        file=file, loaded_signature=loaded_signature, asked=[], gate=None, heard=trio.Event()
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "proxy.toml"
    path.write_text("one")
    return path


async def until(config_store, holds):
    with trio.fail_after(30):
        while not holds(config_store.asked):
            await config_store.heard.wait()


async def test_an_edit_is_read_once_it_has_settled(nursery, file):
    config_store = fake_config_store(file)
    await nursery.start(Reloader(config_store).run)
    file.write_text("two")
    await until(config_store, lambda asked: asked)
    assert config_store.asked == [("file", "two")]
    nursery.cancel_scope.cancel()


async def test_without_a_watch_the_file_is_polled_and_one_line_says_so(
    nursery, file, monkeypatch, caplog, autojump_clock
):
    def no_watch(*_, **__):
        raise WatchfilesRustInternalError("Too many open files (os error 24)")

    monkeypatch.setattr(reloading, "awatch", no_watch)
    config_store = fake_config_store(file)
    await nursery.start(Reloader(config_store).run)
    await trio.sleep(200)  # the watch is tried again, and fails again
    file.write_text("two")
    await until(config_store, lambda asked: asked)
    assert config_store.asked == [("file", "two")]
    (line,) = caplog.messages
    assert "config_watch_failed" in line
    assert "Too many open files" in line
    nursery.cancel_scope.cancel()


async def test_a_file_that_keeps_changing_is_waited_for(file, monkeypatch):
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


async def test_an_edit_while_the_program_starts_is_read(nursery, file):
    config_store = fake_config_store(file)
    file.write_text("meanwhile")
    await nursery.start(Reloader(config_store).run)
    await until(config_store, lambda asked: asked)
    assert config_store.asked == [("file", "meanwhile")]
    nursery.cancel_scope.cancel()


async def test_a_signal_in_the_middle_of_an_edit_waits_for_its_end(file, nursery, monkeypatch):
    config_store = fake_config_store(file)
    reloader = Reloader(config_store)

    async def idle(_):
        await trio.sleep_forever()

    async def edit_goes_on(_):
        if not file.read_text():
            file.write_text("whole")
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(reloader, "_watch", idle)
    await nursery.start(reloader.run)
    monkeypatch.setattr(reloading.trio, "sleep", edit_goes_on)
    file.write_text("")
    reloader.request_reload("SIGHUP")
    await until(config_store, lambda asked: asked)
    assert config_store.asked == [("SIGHUP", "whole")]
    nursery.cancel_scope.cancel()


async def test_changes_of_other_files_cause_no_reload(nursery, file):
    config_store = fake_config_store(file)
    reloader = Reloader(config_store)
    await nursery.start(reloader.run)
    (file.parent / "access.log").write_text("a line")
    reloader.request_reload("SIGHUP")
    await until(config_store, lambda asked: asked)
    file.write_text("two")
    await until(config_store, lambda asked: len(asked) == 2)
    assert [source for source, _ in config_store.asked] == ["SIGHUP", "file"]
    nursery.cancel_scope.cancel()


async def test_pokes_before_a_reload_begins_are_one(nursery, autojump_clock):
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
    assert [source for source, _ in config_store.asked] == ["first", "SIGHUP"]
    nursery.cancel_scope.cancel()


async def test_a_restarted_reloader_continues(file):
    config_store = fake_config_store(file)
    reloader = Reloader(config_store)
    for text in ("two", "three"):
        async with trio.open_nursery() as nursery:
            await nursery.start(reloader.run)
            file.write_text(text)
            await until(config_store, lambda asked: asked and asked[-1] == ("file", text))  # noqa: B023
            nursery.cancel_scope.cancel()
