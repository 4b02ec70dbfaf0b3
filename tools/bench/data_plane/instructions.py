"""Instructions of the data plane per request and per streamed event, in user space.

Counted by valgrind in `hand_driven`, only while the data plane handles its batches. The counts
don't depend on other programs, so they can compare two versions that differ too little for timings.
They don't include the kernel, which takes half of the CPU time or more.
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
COUNTED = "_PyEval_CallTracing"  # a function of CPython that only `sys.call_tracing` calls
MISSING = "valgrind is not installed: apt install valgrind"


def count(mode: str) -> float:
    """Instructions per request or event. Raises LegError, NotInstalled."""
    return instructions_of(["tools.bench.data_plane.hand_driven", mode, str(ROUNDS)])


def instructions_of(program: list[str]) -> float:
    """Instructions per unit; `program` prints the number of units. Raises what `count` raises."""
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
    """The instructions in a dump of callgrind."""
    lines = [line for line in dump.splitlines() if line.startswith("totals:")]
    return int(lines[-1].split()[1]) if lines else 0
