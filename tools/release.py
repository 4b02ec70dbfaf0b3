"""`python -m tools.release STEP ...`: the steps of `tools/build-release` that no other tool has.

    copy FOLDER            copy the files of a source archive to FOLDER
    normalize ARCHIVE      rewrite a .tar.gz so that its bytes depend only on its contents
    sbom PYTHON WHEEL OUT  list the components of PYTHON's environment, as CycloneDX, in folder OUT
    try ENV FILE           run the program that is installed in ENV with FILE, then uninstall it

Invariant: equal sources give equal bytes: times come from SOURCE_DATE_EPOCH
(reproducible-builds.org), and owners and modes are fixed. It must not write outside of the given
folders.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
# Parts of a source archive that setuptools doesn't add.
PARTS: Final = (
    "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile", "LICENSE", "MANIFEST.in", "README.md",
    "pyproject.toml", "config", "contrib", "docs", "omni_proxy", "packages", "tests", "tools",
)  # fmt: skip
IGNORED: Final = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "_native", ".*")
NEVER_REMOVED: Final = ("pip", "setuptools")
START_SECS: Final = 60
LISTENS: Final = re.compile(r"listener_opened url=(http:[^\s\"]+)")


def copy(folder: Path) -> None:
    """Copy the files of a source archive. Raises OSError."""
    folder.mkdir(parents=True)
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=IGNORED)
        else:
            shutil.copy(source, folder / name)


def normalize(archive: Path, at: int) -> None:
    """Rewrite the archive: members sorted by name, without owner, changed at `at` (Unix seconds).

    Raises OSError, and tarfile.TarError if it is not an archive.
    """
    with tarfile.open(archive) as old:
        members = [
            (member, file.read() if (file := old.extractfile(member)) else b"")
            for member in sorted(old.getmembers(), key=lambda member: member.name)
        ]
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=at) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member, content in members:
            member.mtime, member.uid, member.gid, member.uname, member.gname = at, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, io.BytesIO(content))


def sbom(interpreter: Path, wheel: Path, out: Path) -> Path:
    """Write the list of components of an environment in which only this wheel was installed.

    Raises CalledProcessError.
    """
    made = out / (wheel.name.partition("-py3")[0] + ".cdx.json")
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--of", "JSON"]
    command += ["-o", str(made), str(interpreter)]
    subprocess.run(command, check=True)
    listed: dict[str, Any] = json.loads(made.read_text())
    listed["components"] = [
        each for each in listed["components"] if each["name"] not in NEVER_REMOVED
    ]
    # Remove paths of the build machine, which differ between builds.
    for each in [listed["metadata"].get("component", {}), *listed["components"]]:
        each.pop("externalReferences", None)
    made.write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n")
    return made


def try_program(env: Path, example: Path) -> None:
    """Test the installed program; raises AssertionError or CalledProcessError."""
    program = env / "bin/omni-proxy"
    away: dict[str, Any] = {"cwd": env, "check": True, "env": {"HOME": str(env), "PATH": ""}}
    subprocess.run([program, "--version"], stdout=subprocess.DEVNULL, **away)
    subprocess.run([program, "check", example], stdout=subprocess.DEVNULL, **away)
    _serve(program, env)
    before = _installed(env)
    remove = [str(env / "bin/python"), "-m", "pip", "uninstall", "--quiet", "--yes", "omni-proxy"]
    subprocess.run(remove, **away)
    removed = before - _installed(env)
    left = [path for path in env.rglob("*omni*") if path.name.startswith("omni")]
    assert removed, "nothing was removed"
    assert left == [], f"left after the removal: {left}"


def _serve(program: Path, env: Path) -> None:
    """Start the proxy, send a request, end it with SIGTERM and check that its status is 0."""
    file = env / "try.toml"
    file.write_text('[server]\nport = 0\nstate_file = "off"\ndrain_timeout_secs = 1\n')
    with subprocess.Popen(
        [program, "--config", file], stderr=subprocess.PIPE, text=True, cwd=env, env={"PATH": ""}
    ) as process:
        assert process.stderr is not None
        seen = []
        too_late = threading.Timer(START_SECS, process.kill)  # ends the loop
        too_late.start()
        for line in process.stderr:
            seen.append(line)
            if (found := LISTENS.search(line)) is not None:
                url = found[1].rstrip("/")
                break
        else:
            raise AssertionError("it did not start: " + "".join(seen))
        too_late.cancel()
        for path in ("/live", "/dashboard", "/openapi.json"):
            with urllib.request.urlopen(url + path, timeout=START_SECS) as response:
                assert response.status == 200, f"{path}: {response.status}"
        process.terminate()
        process.stderr.read()
        assert process.wait(START_SECS) == 0, f"exit status {process.returncode}"
    file.unlink()


def _installed(env: Path) -> set[Path]:
    return set(env.rglob("omni_proxy/**/*.py"))


def main(argv: list[str]) -> int:
    match argv:
        case ["copy", folder]:
            copy(Path(folder))
        case ["normalize", archive]:
            normalize(Path(archive), int(os.environ["SOURCE_DATE_EPOCH"]))
        case ["sbom", interpreter, wheel, out]:
            sbom(Path(interpreter), Path(wheel), Path(out))
        case ["try", env, example]:
            try_program(Path(env), Path(example))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
