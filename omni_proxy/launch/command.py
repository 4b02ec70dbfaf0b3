"""The argv and the environment of a launched process, built from its [[launch]] entry."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Final

from omni_proxy.config.schema import LaunchEntry
from omni_proxy.self_exec import program_argv

OWN_COMMAND: Final = "omni-proxy"
# PyInstaller sets the first for a frozen binary, and saves the original value in the second.
LIBRARY_PATH: Final = "LD_LIBRARY_PATH"
ORIGINAL_LIBRARY_PATH: Final = "LD_LIBRARY_PATH_ORIG"


def start_parameters(entry: LaunchEntry) -> tuple[object, ...]:
    """What only a restart can change; every other key applies to a running process."""
    return entry.command, entry.env, entry.host, entry.base_port, entry.gpus_per_replica


def argv_of(entry: LaunchEntry, index: int, gpus: Sequence[str]) -> list[str]:
    return [_fill_placeholders(word, entry, index, gpus) for word in _command_words(entry.command)]


def environment_of(
    entry: LaunchEntry, index: int, gpus: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """`environ`, overridden by the allocated GPUs, overridden by the `env` of the entry."""
    env = {"PYTHONUNBUFFERED": "1", **environ}  # output to a pipe comes line by line
    if getattr(sys, "frozen", False) and entry.command[0] != OWN_COMMAND:
        env = _without_frozen_variables(env)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    filled = {
        name: _fill_placeholders(text, entry, index, gpus) for name, text in entry.env.items()
    }
    return env | filled


def _without_frozen_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Without what a frozen binary sets for itself: its libraries fit no other program."""
    kept = {name: text for name, text in env.items() if not name.startswith("_PYI_")}
    original = kept.pop(ORIGINAL_LIBRARY_PATH, None)
    kept.pop(LIBRARY_PATH, None)
    return kept if original is None else kept | {LIBRARY_PATH: original}


def _command_words(command: tuple[str, ...]) -> list[str]:
    if command[0] != OWN_COMMAND:
        return list(command)
    return [*program_argv(), *command[1:]]


def _fill_placeholders(text: str, entry: LaunchEntry, index: int, gpus: Sequence[str]) -> str:
    values = {
        "{host}": entry.host,
        "{port}": str(entry.base_port + index),
        "{gpus}": ",".join(gpus),
        "{index}": str(index),
    }
    # Not str.format: commands may hold JSON, whose braces are no placeholders.
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text
