"""A shell in a separate folder; closing it ends all programs that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.tree import ROOT

PATIENCE_SECS = 90  # a deadline for hung commands, not a claim about speed
LEAVING_SECS = 10
ENV = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "no_proxy": "*"}


class Terminal:
    """Runs commands with this checkout's `omni-proxy`. `places` maps examples to replacements."""

    def __init__(self, folder: Path, places: dict[str, str], python: str) -> None:
        self.folder = folder
        self.places = places
        self._left: list[trio.Process] = []
        (folder / "bin").mkdir()
        command = folder / "bin" / "omni-proxy"
        command.write_text(f'#!/bin/sh\nexec env PYTHONPATH={ROOT} {python} -m omni_proxy "$@"\n')
        command.chmod(0o755)

    async def type(self, line: str, status: int = 0) -> str:
        """Runs a command, which must end with that status; returns its output."""
        process = await self._begin(self._replaced(line), subprocess.PIPE)
        with trio.fail_after(PATIENCE_SECS):
            out = b"".join([piece async for piece in process.stdout])
            returncode = await process.wait()
        assert returncode == status, (line, returncode, out.decode())
        return out.decode()

    async def leave_running(self, line: str) -> None:
        """Runs a command, which may end with &, until the terminal is closed."""
        script = f"trap 'wait; exit' TERM\n{self._replaced(line)}\nwait"
        with (self.folder / "said").open("ab") as output:
            self._left.append(await self._begin(script, output.fileno()))

    @property
    def output(self) -> str:
        """The output of commands that were left running."""
        output = self.folder / "said"
        return output.read_text() if output.exists() else ""

    async def close(self) -> None:
        for process in self._left:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self._left:
            with trio.move_on_after(LEAVING_SECS):
                await process.wait()
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    def _replaced(self, line: str) -> str:
        for example, replacement in self.places.items():
            line = line.replace(example, replacement)
        return line

    async def _begin(self, script: str, out: int) -> trio.Process:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return await trio.lowlevel.open_process(
            ["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, env={**os.environ, **ENV, "PATH": path}, cwd=self.folder,
            start_new_session=True,
        )  # fmt: skip


@asynccontextmanager
async def terminal(folder: Path, places: dict[str, str], python: str = sys.executable):
    """Opens a terminal; `python` is the interpreter of `omni-proxy`."""
    opened = Terminal(folder, places, python)
    try:
        yield opened
    except BaseException as fault:
        fault.add_note(opened.output)
        raise
    finally:
        with trio.CancelScope(shield=True):
            await opened.close()
