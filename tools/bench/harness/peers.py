"""Third-party programs for the bench, each in its own environment in the user's cache.

A program is installed on first use, in one fixed version, because figures of different versions are
not comparable. An installation counts only if its last step succeeded. The project's own
environment is never changed.
"""

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.bench.harness.build import cache

VERSIONS = {
    "sglang-router": "0.3.2",
    "smg": "1.13.0",
    "vllm-router": "0.1.17",
    "py-spy": "0.4.3",
}
ROOT = Path(__file__).parents[3]
INSTALL_SECS = 900
LAST_LINES = 6
NO_VENV = "Debian and Ubuntu have venv in a separate package: apt install python3-venv"
NO_PACKAGE = "is this machine online, and does its registry (pip config list) have that version?"


class NotInstalled(Exception):
    """A program could not be installed; the message has its name, the reason and a remedy."""


def borrowed(name: str) -> Path:
    """The program `name`, installed if missing. Raises NotInstalled."""
    version = VERSIONS[name]
    place = cache() / f"{name}-{version}"
    program, whole = place / "bin" / name, place / "whole"
    with _alone(place.with_suffix(".lock")):
        if not (whole.exists() and _runs(place)):
            whole.unlink(missing_ok=True)
            _print(f"installing {name} {version} into {place}")
            _make(place, f"{name}=={version}")
            if not program.exists():
                raise NotInstalled(f"the package {name} {version} has no program {name}")
            whole.touch()
            _print(f"{name} {version} is installed")
    return program


def _make(place: Path, wanted: str) -> None:
    python = str(place / "bin" / "python")
    install_step([sys.executable, "-m", "venv", "--clear", str(place)], wanted, NO_VENV)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", wanted]
    install_step(pip, wanted, NO_PACKAGE)


def install_step(argv: list[str], wanted: str, advice: str) -> None:
    """Run one step; pip writes its progress to the terminal."""
    try:
        ran = subprocess.run(
            argv, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True,
            check=False, timeout=INSTALL_SECS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotInstalled(
            f"{wanted} was not installed within {INSTALL_SECS} s; {advice}"
        ) from None
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if not line.startswith("WARNING")]
        quoted = "\n  ".join(lines[-LAST_LINES:])
        raise NotInstalled(f"{wanted} could not be installed:\n  {quoted}\n{advice}")


def _runs(place: Path) -> bool:
    """Whether the interpreter runs: if it was removed, the environment still has its files."""
    python = place / "bin" / "python"
    return python.exists() and not subprocess.run([python, "-c", ""], check=False).returncode


def _print(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock, so that concurrent benches install one after another."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def proxy_python() -> str:
    """An interpreter with the proxy's packages: this one, or the project's, created if missing.

    This allows running the bench from a fresh clone with any Python. Raises NotInstalled.
    """
    tried = [sys.executable, "-c", "import omni_proxy.server"]
    if not subprocess.run(tried, check=False, cwd=ROOT, stderr=subprocess.DEVNULL).returncode:
        return sys.executable
    bash = shutil.which("bash")
    if bash is None:
        raise NotInstalled(
            f"{sys.executable} lacks the proxy's packages: pip install --editable {ROOT}"
        )
    ensure = f"source {ROOT}/tools/ensure-venv && ensure_venv dev"
    ran = subprocess.run([bash, "-c", ensure, "bench"], check=False, stdout=sys.stderr.fileno())
    if ran.returncode:
        raise NotInstalled("the project's environment could not be created; see the output above")
    return str(ROOT / ".venv" / "bin" / "python")
