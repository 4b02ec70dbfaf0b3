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
def made(tmp_path_factory):
    """Of our own modules only: what they need is found where the tests find it."""
    folder = tmp_path_factory.mktemp("made")
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "omni_proxy", folder / "installed/omni_proxy", ignore=unwanted)
    pack(folder / "installed", folder / "omni-proxy.pyz")
    return folder


@pytest.fixture
def archive(made, tmp_path):
    return Path(shutil.copy(made / "omni-proxy.pyz", tmp_path))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def run(archive, cache):
    def start(*words, **more):
        env = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(cache), **more}
        command = [sys.executable, "-P", archive, *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=env, cwd="/"
        )

    return start


def test_an_archive_runs_what_it_unpacked_and_unpacks_once(run, cache):
    reported = run("--version")
    assert (reported.stdout, reported.stderr) == (f"omni-proxy {__version__}\n", "")
    (folder,) = (cache / "omni-proxy").iterdir()
    marked = folder / "omni_proxy/__init__.py"
    marked.write_text('__version__ = "unpacked"\n')
    assert run("--version").stdout == "omni-proxy unpacked\n"
    assert list((cache / "omni-proxy").iterdir()) == [folder]


def test_its_commands_find_their_pages_and_modules(run, cache):
    reported = run("status", "--url", "http://127.0.0.1:1")
    assert (reported.returncode, "cannot connect" in reported.stderr) == (2, True)
    assert list((cache / "omni-proxy").rglob("admin_api/pages/dashboard/page.html"))


def test_another_content_is_unpacked_beside_it(run, archive, made, cache, tmp_path):
    run("--version")
    shutil.copytree(made / "installed", tmp_path / "installed")
    (tmp_path / "installed/omni_proxy/__init__.py").write_text('__version__ = "9"\n')
    pack(tmp_path / "installed", archive)
    assert run("--version").stdout == "omni-proxy 9\n"
    assert len(list((cache / "omni-proxy").iterdir())) == 2


def test_without_a_home_it_is_unpacked_for_this_run(run, tmp_path):
    (tmp_path / "file").touch()
    reported = run("--version", XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    assert reported.stdout == f"omni-proxy {__version__}\n"


def test_another_python_is_informed_which_one_it_was_made_for(run, archive, tmp_path):
    rewritten = tmp_path / "other.pyz"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(rewritten, "w") as new:
        new.writestr("__main__.py", old.read("__main__.py"))
        new.writestr(MADE_FOR, "3.99 x")
    Path(rewritten).replace(archive)
    reported = run("--version")
    assert reported.returncode == 1
    assert "needs Python 3.99" in reported.stderr
