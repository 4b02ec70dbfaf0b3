"""Which build runs: a complete compiled set that matches the sources, or plain Python."""

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
    """Cached: finding and hashing them takes longer than the rest of these tests."""
    return read_sources(ROOT)


def run(folder, script=SHOW, **variables):
    env = {**os.environ, "OMNI_PROXY_NATIVE": str(folder), "OMNI_PROXY_PURE": "", **variables}
    env.pop("OMNI_PROXY_NATIVE_REFUSED", None)
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip(), result.stderr


@pytest.fixture
def libraries(tmp_path):
    """Placeholders for the compiled modules, which are not loaded here."""
    files = []
    for name in MODULES:
        files.append(tmp_path / "compiled" / f"{name}{SUFFIX}")
        files[0].parent.mkdir(exist_ok=True)
        files[-1].write_text(name)
    return files


@pytest.fixture
def folder(tmp_path, libraries):
    out = tmp_path / "out"
    out.mkdir()
    publish(libraries, sources_here(), out)
    return out


def change(folder, edit):
    """Calls `edit` with the manifest, and writes it back."""
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def modules_of(folder):
    return folder / json.loads((folder / "manifest.json").read_text())["folder"]


def refusal_of(folder):
    """Asserts that the native build is refused; returns the message on stderr."""
    shown, errors = run(folder)
    assert shown == PLAIN
    assert errors.startswith("omni-proxy: not using the native build in ")
    assert errors.endswith("; run tools/build-native to rebuild it\n")
    assert errors.count("\n") == 1
    return errors


def test_a_complete_set_is_used(folder):
    assert run(folder) == (NATIVE, "")


def test_plain_python_runs_where_nothing_was_compiled(tmp_path):
    (tmp_path / ".lock").touch()  # the lock of a build that has just begun
    assert run(tmp_path) == (PLAIN, "")
    assert run(tmp_path / "none") == (PLAIN, "")


def test_a_variable_selects_plain_python(folder):
    assert run(folder, OMNI_PROXY_PURE="1") == (PLAIN, "")


def test_a_changed_time_of_an_equal_source_does_not_matter(folder):
    def is_newer(manifest):
        manifest["sources"][CHANGED][1] += 1

    change(folder, is_newer)
    assert run(folder) == (NATIVE, "")


@pytest.mark.parametrize("place", [0, 2], ids=["another size", "another content"])
def test_a_set_built_from_other_sources_is_not_used(folder, place):
    def is_other(manifest):
        entry = manifest["sources"][CHANGED]
        entry[1] += 1
        entry[place] = entry[place] + 1 if place == 0 else "0" * 64

    change(folder, is_other)
    assert f"was built from a different {CHANGED}" in refusal_of(folder)


def test_a_set_with_a_missing_source_is_not_used(folder):
    change(folder, lambda manifest: manifest["sources"].update({"omni_proxy/x.pxd": [0, 0, ""]}))
    assert "was built from a different omni_proxy/x.pxd" in refusal_of(folder)


def test_a_set_with_a_missing_or_damaged_module_is_not_used(folder):
    file = modules_of(folder) / f"{MODULES[3]}{SUFFIX}"
    file.write_text("h")
    assert f"has a damaged module {MODULES[3]}" in refusal_of(folder)
    file.unlink()
    assert f"is incomplete ({file} is missing)" in refusal_of(folder)


def test_a_set_without_its_manifest_is_not_used(folder):
    (folder / "manifest.json").unlink()
    assert "is incomplete" in refusal_of(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"suffix": 1, "folder": 2}', "\0"])
def test_a_set_with_a_damaged_manifest_is_not_used(folder, text):
    (folder / "manifest.json").write_text(text)
    assert "it can't be read" in refusal_of(folder)


def test_a_set_for_another_python_is_not_used(folder):
    change(folder, lambda manifest: manifest.update(suffix=".cpython-27-x86_64-linux-gnu.so"))
    assert "was built for another Python" in refusal_of(folder)


def test_the_message_is_printed_once_for_all_processes_of_a_program(folder):
    (folder / "manifest.json").unlink()
    script = f"{SHOW}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {SHOW!r}])"
    shown, errors = run(folder, script)
    assert shown == f"{PLAIN}\n{PLAIN}"
    assert errors.count("\n") == 1


def test_a_new_set_keeps_the_previous_one_for_programs_that_just_started(folder, libraries):
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


def test_publishing_the_same_set_repairs_a_damaged_one(folder, libraries):
    (modules_of(folder) / f"{MODULES[0]}{SUFFIX}").unlink()
    publish(libraries, sources_here(), folder)
    assert run(folder) == (NATIVE, "")


def test_files_of_an_older_version_are_removed(folder, libraries):
    (folder / f"{MODULES[0]}{SUFFIX}").touch()
    publish(libraries, sources_here(), folder)
    assert not list(folder.glob("*.so"))


def test_the_manifest_has_every_compiled_file():
    sources = sources_here()
    assert {f"{name.replace('.', '/')}.py" for name in MODULES} <= sources.keys()
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("omni_proxy/**/*.pyx")} <= set(
        sources
    )
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("omni_proxy/**/*.pxd")} <= set(
        sources
    )
    assert {Path(name).suffix for name in sources} == {".py", ".pxd", ".pyx"}


def test_in_a_frozen_binary_sources_are_not_compared(folder):
    change(folder, lambda manifest: manifest["sources"].update({"omni_proxy/x.pxd": [0, 0, ""]}))
    assert run(folder, f"import sys\nsys.frozen = True\n{SHOW}") == (NATIVE, "")
