import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from omni_proxy.config.schema import Config, ServerConfig
from omni_proxy.weight_sync.protocol.journal import Journal, UnreadableJournal
from omni_proxy.weight_sync.state_journal import JournalFile, PublishedVersion, folder_for

SOME = Journal(uncertain={"http://a": "why"})


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def file(tmp_path):
    return JournalFile(tmp_path / "deep" / "proxy.weights")


def test_temporary_files_of_killed_writes_are_removed_at_the_start(file):
    file.write(SOME)
    process = subprocess.Popen(["true"])
    process.wait()
    for name in ("journal", "epoch"):
        (file.folder / f".{name}.json.{process.pid}").write_text("half")
    assert JournalFile(file.folder).read() == SOME
    assert os.listdir(file.folder) == ["journal.json"]


def test_a_journal_file_is_private_and_survives_a_restart(file):
    assert file.read() == Journal()
    file.write(SOME)
    assert file.read() == SOME
    assert (mode(file.folder), mode(file.path)) == (0o700, 0o600)


def test_a_write_flushes_file_and_folder_to_the_disk_before_it_returns(file, monkeypatch):
    synced = []
    fsync = os.fsync

    def record_fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    file.write(SOME)
    assert [path.name.startswith(".journal.json") for path in synced] == [True, False, False]
    assert synced[1:] == [file.folder, file.folder.parent]
    synced.clear()
    file.write(Journal())
    assert synced == [file.folder]
    assert not file.path.exists()


def test_clearing_a_missing_journal_creates_no_file(file):
    file.write(Journal())
    assert not file.folder.exists()


def test_an_unreadable_journal_is_set_aside_unchanged(file):
    file.write(SOME)
    file.path.write_text("{")
    with pytest.raises(UnreadableJournal):
        file.read()
    file.set_aside()
    assert file.read() == Journal()
    assert (file.folder / "journal.unreadable").read_text() == "{"


def test_an_invalid_folder_is_not_an_empty_journal(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(UnreadableJournal, match="Not a directory"):
        JournalFile(tmp_path / "f").read()


def test_the_epoch_is_stored(file):
    assert file.read_published() == PublishedVersion(0, None)
    file.write_published(PublishedVersion(7, "v7"))
    assert file.read_published() == PublishedVersion(7, "v7")


def test_a_lone_surrogate_in_a_label_becomes_a_question_mark(tmp_path):
    JournalFile(tmp_path).write_published(PublishedVersion(1, "\ud800"))
    assert JournalFile(tmp_path).read_published() == PublishedVersion(1, "?")


@pytest.mark.parametrize("junk", ["", "[]", '{"epoch": "x", "label": null}', '{"epoch": 3}'])
def test_an_unreadable_epoch_never_decreases(file, junk):
    file.write_published(PublishedVersion(70_000, "v"))
    (file.folder / "epoch.json").write_text(junk)
    assert file.read_published().epoch > 70_000


def test_the_folder_is_next_to_the_state_file_or_in_the_user_state_folder():
    config = Config(server=ServerConfig(host="127.0.0.1", port=30001))
    folder = folder_for(Path("/etc/o/proxy.state.toml"), config, {})
    assert folder == Path("/etc/o/proxy.weights")
    assert folder_for(Path("s"), config, {}) == Path("s.weights")
    home = folder_for(None, config, {"XDG_STATE_HOME": "/var/s"})
    assert home == Path("/var/s/omni-proxy/127.0.0.1-30001")
    assert folder_for(None, config, {}) == Path.home() / ".local/state/omni-proxy/127.0.0.1-30001"


def test_the_epoch_file_is_plain_json(file):
    file.write_published(PublishedVersion(1, None))
    assert json.loads((file.folder / "epoch.json").read_text()) == {"epoch": 1, "label": None}
