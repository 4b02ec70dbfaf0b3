"""Instructions of the data plane per request and per streamed event, in user space.

valgrind counts those of `hand_driven`, and of it only what the data plane does in its batches. So
they do not depend on what else the machine does, and compare two versions where timings can't. The
kernel's part, which is half of the CPU time or more, is not among them.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tools.bench.harness.load_run import LegError
from tools.bench.harness.peers import ROOT, proxy_python

MODES = ("unary", "stream")
ROUNDS = 100
COUNTED = "_PyEval_CallTracing"  # of CPython: what `sys.call_tracing` calls, and nothing else does
MISSING = "counts with valgrind, which is not installed: apt install valgrind"


def count(mode: str) -> float:
    """Per request or event. Raises LegError, NotInstalled."""
    return instructions_of(["tools.bench.data_plane.hand_driven", mode, str(ROUNDS)])


def instructions_of(program: list[str]) -> float:
    """By what the module prints: how often it did what it counts. Raises as `count`."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise LegError(MISSING)
    with tempfile.TemporaryDirectory(prefix="omni-proxy-bench-") as folder:
        out = Path(folder) / "callgrind"
        flags = ["--quiet", "--tool=callgrind", f"--toggle-collect={COUNTED}"]
        ran = subprocess.run(
            [valgrind, *flags, f"--callgrind-out-file={out}",
             proxy_python(), "-m", *program],
            capture_output=True, text=True, check=False, cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        if ran.returncode:
            raise LegError(f"the driven data plane failed:\n{ran.stderr.strip()}")
        instructions = total_of(out.read_text(errors="replace"))
    if not instructions:
        raise LegError(f"this interpreter has no symbol {COUNTED}, so nothing was counted")
    return instructions / int(ran.stdout)


def total_of(dump: str) -> int:
    """Instructions of a dump of callgrind."""
    lines = [line for line in dump.splitlines() if line.startswith("totals:")]
    return int(lines[-1].split()[1]) if lines else 0
