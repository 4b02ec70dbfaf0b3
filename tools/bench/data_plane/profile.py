"""Profile of the proxy under load: py-spy's samples, summed by line and by function."""

import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tools.bench.harness.load_run import LegError, Load, fake_worker, started
from tools.bench.harness.peers import borrowed
from tools.bench.harness.processes import running
from tools.bench.harness.proxies import Side

SHOWN = 25  # lines, and as many functions


def profile(side: Side, load: Load, secs: float) -> list[str]:
    """The lines of a table. Samples in the kernel are counted at the Python line that called it.

    Raises LegError, NotInstalled.
    """
    program = shutil.which("py-spy") or str(borrowed("py-spy"))
    with tempfile.TemporaryDirectory(prefix="omni-proxy-bench-") as folder:
        stacks = Path(folder) / "stacks"
        with fake_worker() as workers, started(side, workers) as (port, pid):
            argv = load.argv(port, round(1000 * (secs + 1)))
            with running(argv, subprocess.DEVNULL):
                _record([program, "record", "--pid", str(pid), "--duration", f"{secs:.0f}"], stacks)
        return table(stacks.read_text())


def _record(argv: list[str], stacks: Path) -> None:
    shape = ["--subprocesses", "--threads", "--rate", "500", "--format", "raw", "-o", str(stacks)]
    ran = subprocess.run([*argv, *shape], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise LegError(f"py-spy could not profile the proxy:\n{ran.stderr.strip()}")


def table(stacks: str) -> list[str]:
    """Convert folded stacks, one `outer;inner COUNT` per line, to shares of lines and functions.

    Only main threads: for py-spy, a thread that sleeps in native code (watchfiles) looks busy.
    """
    lines: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for stack in stacks.splitlines():
        if ": MainThread;" not in stack:
            continue
        path, _, count = stack.rpartition(" ")
        frames = path.split(";")
        lines[frames[-1]] += int(count)
        for function in {frame.rpartition(":")[0] + ")" for frame in frames if ".py:" in frame}:
            functions[function] += int(count)
    total = lines.total() or 1
    return [
        f"{total} samples",
        "in this line itself",
        *_shares(lines, total),
        "in this function and what it calls",
        *_shares(functions, total),
    ]


def _shares(counts: Counter[str], total: int) -> list[str]:
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return [f"{count / total:7.1%}  {name}" for name, count in ranked[:SHOWN]]
