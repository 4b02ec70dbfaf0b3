"""Which build runs: a complete set of compiled modules that matches the text, or plain Python."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests.tree import ROOT
from tools.native_build.build import MODULES, publish, read_sources

SUFFIX = EXTENSION_SUFFIXES[0]
CHANGED = "omni_proxy/fleet/worker.pxd"
NATIVE = "native omni-proxy 1 (native build)"
PLAIN = "python omni-proxy 1"
SHOW = "from omni_proxy import native; print(native.build(), native.full_version('1'))"


@cache
def sources_here():
    """To find and hash them takes longer than anything else here."""
    return read_sources(ROOT)


def run(folder, script=SHOW, **variables):
    env = {**os.environ, "OMNI_PROXY_NATIVE": str(folder), "OMNI_PROXY_PURE": "", **variables}
    env.pop("OMNI_PROXY_NATIVE_REFUSED", None)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr


@pytest.fixture
def libraries(tmp_path):
    """In the place of compiled modules, which nobody loads here."""
    made = []
    for name in MODULES:
        made.append(tmp_path / "made" / f"{name}{SUFFIX}")
        made[0].parent.mkdir(exist_ok=True)
        made[-1].write_text(name)
    return made


@pytest.fixture
def folder(tmp_path, libraries):
    out = tmp_path / "out"
    out.mkdir()
    publish(libraries, sources_here(), out)
    return out


def change(folder, what):
    """`what` gets the manifest, to change it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    what(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def modules_of(folder):
    return folder / json.loads((folder / "manifest.json").read_text())["folder"]


def refused(folder):
    """The line that says why."""
    shown, errors = run(folder)
    assert shown == PLAIN
    assert errors.startswith("omni-proxy: not using the native build in ")
    assert errors.endswith("; run tools/build-native to rebuild it\n")
    assert errors.count("\n") == 1
    return errors


def test_a_complete_set_is_used(folder):
    assert run(folder) == (NATIVE, "")


def test_plain_python_runs_where_nothing_was_compiled(tmp_path):
    (tmp_path / ".lock").touch()  # of a build that has just begun
    assert run(tmp_path) == (PLAIN, "")
    assert run(tmp_path / "none") == (PLAIN, "")


def test_a_variable_asks_for_plain_python(folder):
    assert run(folder, OMNI_PROXY_PURE="1") == (PLAIN, "")


def test_the_text_decides_where_its_time_has_changed(folder):
    def is_newer(manifest):
        manifest["sources"][CHANGED][1] += 1

    change(folder, is_newer)
    assert run(folder) == (NATIVE, "")


@pytest.mark.parametrize("place", [0, 2], ids=["another size", "another content"])
def test_a_set_that_was_made_of_another_text_is_not_used(folder, place):
    def is_other(manifest):
        entry = manifest["sources"][CHANGED]
        entry[1] += 1
        entry[place] = entry[place] + 1 if place == 0 else "0" * 64

    change(folder, is_other)
    assert f"was built from a different {CHANGED}" in refused(folder)


def test_a_text_that_is_not_there_any_more_is_another(folder):
    change(folder, lambda manifest: manifest["sources"].update({"omni_proxy/x.pxd": [0, 0, ""]}))
    assert "was built from a different omni_proxy/x.pxd" in refused(folder)


def test_a_set_without_a_module_or_with_half_of_one_is_not_used(folder):
    file = modules_of(folder) / f"{MODULES[3]}{SUFFIX}"
    file.write_text("h")
    assert f"has a damaged module {MODULES[3]}" in refused(folder)
    file.unlink()
    assert f"is incomplete ({file} is missing)" in refused(folder)


def test_a_set_without_its_manifest_is_not_used(folder):
    (folder / "manifest.json").unlink()
    assert "is incomplete" in refused(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"suffix": 1, "folder": 2}', "\0"])
def test_a_damaged_manifest_is_not_read(folder, text):
    (folder / "manifest.json").write_text(text)
    assert "it can't be read" in refused(folder)


def test_a_set_for_another_python_is_not_used(folder):
    change(folder, lambda manifest: manifest.update(suffix=".cpython-27-x86_64-linux-gnu.so"))
    assert "was built for another Python" in refused(folder)


def test_processes_of_one_program_say_it_once(folder):
    (folder / "manifest.json").unlink()
    script = f"{SHOW}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {SHOW!r}])"
    shown, errors = run(folder, script)
    assert shown == f"{PLAIN}\n{PLAIN}"
    assert errors.count("\n") == 1


def test_a_new_set_leaves_the_one_before_for_who_has_just_started(folder, libraries):
    first = modules_of(folder)
    again = []
    for number in range(2):
        libraries[0].write_text(f"changed {number}")
        publish(libraries, sources_here(), folder)
        again.append(modules_of(folder))
        assert run(folder) == (NATIVE, "")
        if number == 0:
            assert (first / f"{MODULES[0]}{SUFFIX}").exists()
    assert sorted(path for path in folder.iterdir() if path.is_dir()) == sorted(again)


def test_the_same_set_again_mends_a_damaged_one(folder, libraries):
    (modules_of(folder) / f"{MODULES[0]}{SUFFIX}").unlink()
    publish(libraries, sources_here(), folder)
    assert run(folder) == (NATIVE, "")


def test_what_an_older_version_left_goes(folder, libraries):
    (folder / f"{MODULES[0]}{SUFFIX}").touch()
    publish(libraries, sources_here(), folder)
    assert not list(folder.glob("*.so"))


def test_the_manifest_has_every_file_that_is_compiled():
    sources = sources_here()
    assert {f"{name.replace('.', '/')}.py" for name in MODULES} <= sources.keys()
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("omni_proxy/**/*.pyx")} <= set(
        sources
    )
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("omni_proxy/**/*.pxd")} <= set(
        sources
    )
    assert {Path(name).suffix for name in sources} == {".py", ".pxd", ".pyx"}


def test_a_single_file_has_no_text_to_compare_with(folder):
    change(folder, lambda manifest: manifest["sources"].update({"omni_proxy/x.pxd": [0, 0, ""]}))
    assert run(folder, f"import sys\nsys.frozen = True\n{SHOW}") == (NATIVE, "")
