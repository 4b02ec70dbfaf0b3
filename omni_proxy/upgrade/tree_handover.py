"""Hands the prefix trees of all processes over from the running program to the new one.

Each process writes its trees to a file in memory, and a process of the new program reads it; the
main processes only pass descriptors. Invariant: trees whose transfer fails or takes too long are
left out, and their process starts with empty ones; nothing here makes an upgrade fail.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

import trio

from omni_proxy.multiprocess.ipc.messages import LoadTreesCommand, SaveTreesCommand
from omni_proxy.multiprocess.process_slot import ProcessHandle
from omni_proxy.multiprocess.shared_memory.prefix_trees import (
    RESTORE_SECS,
    load_trees,
    save_trees,
    tree_file,
)
from omni_proxy.upgrade.program_parts import ProgramParts

_log = logging.getLogger(__name__)

SAVE_SECS: Final = 4.0
LOAD_SECS: Final = RESTORE_SECS + 2
POLL_SECS: Final = 0.02
MAIN: Final = 0  # the index of the main process if it is the only one


async def save_all(parts: ProgramParts, stack: ExitStack) -> dict[int, int]:
    """Save trees; return their descriptors by process index. `stack` closes them."""
    handles = [handle for handle in parts.process_manager.handles if handle.ready]
    if not handles:
        file = _new_file(stack)
        if file is None:
            return {}
        await save_trees(parts.data_plane, file)
        return {MAIN: file} if os.fstat(file).st_size else {}
    waiting: list[tuple[ProcessHandle, int, int]] = []
    for handle in handles:
        file = _new_file(stack)
        if file is not None and (number := _send(handle, SaveTreesCommand(), file)):
            waiting.append((handle, number, file))
    await _until_acknowledged([(handle, number) for handle, number, _ in waiting], SAVE_SECS)
    return {
        handle.index: file
        for handle, number, file in waiting
        if handle.acked >= number and os.fstat(file).st_size
    }


async def load_all(parts: ProgramParts, files: Mapping[int, int]) -> None:
    """Load trees into each process: those of the old process with its index.

    If there are more processes than before, the additional ones get copies of the same trees.
    """
    if not files:
        return
    slots = list(parts.process_manager.slots.values())
    order = [file for _, file in sorted(files.items())]
    if not slots:
        await load_trees(parts.data_plane, order[0])
        return
    waiting: list[tuple[ProcessHandle, int]] = []
    for slot in slots:
        while slot.handle is None or not slot.handle.ready:  # noqa: ASYNC110
            await trio.sleep(POLL_SECS)
    await parts.process_manager.await_replicated()  # they need the workers first
    for slot in slots:
        file = files.get(slot.index, order[(slot.index - 1) % len(order)])
        if slot.handle is not None and (number := _send(slot.handle, LoadTreesCommand(), file)):
            waiting.append((slot.handle, number))
    await _until_acknowledged(waiting, LOAD_SECS)


def _new_file(stack: ExitStack) -> int | None:
    try:
        file = tree_file()
    except OSError as error:
        _log.warning("prefix_trees_left_out error=%s", error.strerror)
        return None
    stack.callback(os.close, file)
    return file


def _send(handle: ProcessHandle, command: SaveTreesCommand | LoadTreesCommand, file: int) -> int:
    """Send a command; return its number, 0 if it could not be sent."""
    try:
        return handle.send_files(command, file)
    except OSError as error:
        _log.warning("prefix_trees_left_out process=%d error=%s", handle.index, error.strerror)
        return 0


async def _until_acknowledged(waiting: list[tuple[ProcessHandle, int]], secs: float) -> None:
    with trio.move_on_after(secs) as scope:
        for handle, number in waiting:
            await handle.wait_acknowledged(number)
    if scope.cancelled_caught:
        late = [handle.index for handle, number in waiting if handle.acked < number]
        _log.warning("prefix_tree_timeout processes=%s secs=%g was=prefix_trees_late", late, secs)
