import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from omni_proxy import __version__
from tests.tree import ROOT
from tools.archive import pack
from tools.archive_main import MADE_FOR


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the package alone and its archive; the tests' environment has the rest."""
    folder = tmp_path_factory.mktemp("made")
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "omni_proxy", folder / "installed/omni_proxy", ignore=unwanted)
    pack(folder / "installed", folder / "omni-proxy.pyz")
    return folder


@pytest.fixture
def archive(built, tmp_path):
    return Path(shutil.copy(built / "omni-proxy.pyz", tmp_path))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def run(archive, cache):
    def start(*arguments, **variables):
        env = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(cache), **variables}
        command = [sys.executable, "-P", archive, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=env, cwd="/"
        )

    return start


def test_an_archive_is_unpacked_once_and_runs_from_the_cache(run, cache):
    result = run("--version")
    assert (result.stdout, result.stderr) == (f"omni-proxy {__version__}\n", "")
    (folder,) = (cache / "omni-proxy").iterdir()
    init_file = folder / "omni_proxy/__init__.py"
    init_file.write_text('__version__ = "unpacked"\n')
    assert run("--version").stdout == "omni-proxy unpacked\n"
    assert list((cache / "omni-proxy").iterdir()) == [folder]


def test_commands_of_an_archive_find_their_pages_and_modules(run, cache):
    result = run("status", "--url", "http://127.0.0.1:1")
    assert (result.returncode, "cannot connect" in result.stderr) == (2, True)
    assert list((cache / "omni-proxy").rglob("admin_api/pages/dashboard/page.html"))


def test_a_changed_archive_is_unpacked_into_its_own_folder(run, archive, built, cache, tmp_path):
    run("--version")
    shutil.copytree(built / "installed", tmp_path / "installed")
    (tmp_path / "installed/omni_proxy/__init__.py").write_text('__version__ = "9"\n')
    pack(tmp_path / "installed", archive)
    assert run("--version").stdout == "omni-proxy 9\n"
    assert len(list((cache / "omni-proxy").iterdir())) == 2


def test_without_a_cache_folder_an_archive_is_unpacked_for_one_run(run, tmp_path):
    (tmp_path / "file").touch()
    result = run("--version", XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    assert result.stdout == f"omni-proxy {__version__}\n"


def test_an_unsuitable_python_is_refused_with_the_version_needed(run, archive, tmp_path):
    rewritten = tmp_path / "other.pyz"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(rewritten, "w") as new:
        new.writestr("__main__.py", old.read("__main__.py"))
        new.writestr(MADE_FOR, "3.99 x")
    Path(rewritten).replace(archive)
    result = run("--version")
    assert result.returncode == 1
    assert "needs Python 3.99" in result.stderr
