"""What a launched process is started from: its words and variables, out of the entry."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Final

from omni_proxy.config.schema import LaunchEntry
from omni_proxy.self_exec import program_argv

OURSELVES: Final = "omni-proxy"
# Where a single-file build finds its own libraries, and where it keeps what was there before.
LIBRARIES: Final = "LD_LIBRARY_PATH"
BEFORE: Final = "LD_LIBRARY_PATH_ORIG"


def recipe(entry: LaunchEntry) -> tuple[object, ...]:
    """What only a new process takes over; every other key is taken over by a running one."""
    return entry.command, entry.env, entry.host, entry.base_port, entry.gpus_per_replica


def argv_of(entry: LaunchEntry, index: int, gpus: Sequence[str]) -> list[str]:
    return [_filled(word, entry, index, gpus) for word in _program(entry.command)]


def environment_of(
    entry: LaunchEntry, index: int, gpus: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """`environ`, then our slice of GPUs, then what the entry says: the person has the last word."""
    # What it prints into a pipe shall come when it is printed.
    env = {"PYTHONUNBUFFERED": "1", **environ}
    if getattr(sys, "frozen", False) and entry.command[0] != OURSELVES:
        env = _as_it_was(env)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env | {name: _filled(text, entry, index, gpus) for name, text in entry.env.items()}


def _as_it_was(env: Mapping[str, str]) -> dict[str, str]:
    """Without what a single-file build sets for itself: its libraries suit no other program."""
    kept = {name: text for name, text in env.items() if not name.startswith("_PYI_")}
    before = kept.pop(BEFORE, None)
    kept.pop(LIBRARIES, None)
    return kept if before is None else kept | {LIBRARIES: before}


def _program(command: tuple[str, ...]) -> list[str]:
    if command[0] != OURSELVES:
        return list(command)
    return [*program_argv(), *command[1:]]


def _filled(text: str, entry: LaunchEntry, index: int, gpus: Sequence[str]) -> str:
    values = {
        "{host}": entry.host,
        "{port}": str(entry.base_port + index),
        "{gpus}": ",".join(gpus),
        "{index}": str(index),
    }
    # Not str.format: commands carry JSON, whose braces are nobody's place holders.
    for place, value in values.items():
        text = text.replace(place, value)
    return text
