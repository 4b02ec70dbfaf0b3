"""Where the proxy's time goes under load: py-spy's samples, added up per function."""

import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tools.bench.legs import LegError, Load, fake_worker, started
from tools.bench.processes import running
from tools.bench.sides import Side

SHOWN = 25
NO_PY_SPY = "the profile needs py-spy, which is not installed; `pip install py-spy` mends that"


def profile(side: Side, load: Load, secs: float) -> list[str]:
    """Lines of a table. Samples that the kernel took are counted where Python called it."""
    program = shutil.which("py-spy")
    if program is None:
        raise LegError(NO_PY_SPY)
    with tempfile.TemporaryDirectory(prefix="omni-proxy-bench-") as folder:
        stacks = Path(folder) / "stacks"
        with fake_worker() as workers, started(side, workers) as (port, pid):
            argv = load.argv(port, round(1000 * (secs + 1)))
            with running(argv, subprocess.DEVNULL):
                _record([program, "record", "--pid", str(pid), "--subprocesses"], secs, stacks)
        return table(stacks.read_text())


def _record(argv: list[str], secs: float, stacks: Path) -> None:
    shape = ["--format", "raw", "--rate", "500", "--duration", str(round(secs)), "-o", str(stacks)]
    ran = subprocess.run([*argv, *shape], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise LegError(f"py-spy could not look into the proxy:\n{ran.stderr.strip()}")


def table(stacks: str) -> list[str]:
    """Folded stacks, `outer;inner COUNT` a line, to shares of self and of all time."""
    inside: Counter[str] = Counter()
    within: Counter[str] = Counter()
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        names = frames.split(";")
        inside[names[-1]] += int(count)
        for name in set(names):
            within[name] += int(count)
    total = inside.total() or 1
    lines = [f"{total} samples", " self    all  where"]
    lines += [
        f"{own / total:5.1%} {within[name] / total:6.1%}  {name}"
        for name, own in inside.most_common(SHOWN)
    ]
    return lines
