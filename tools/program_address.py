"""Reads from its log where a proxy, started by a tool, listens.

Invariant: the log is not read further than the line with the address; the caller may read the rest.
"""

from __future__ import annotations

import re

import trio

# The second form is of older releases, to which benchmarks compare.
LISTENS = re.compile(rb"(?:listener_opened url=|listening on )(http:[^\s\"]+)")
START_SECS = 30


async def program_address(process: trio.Process) -> str:
    """The URL of a proxy whose stderr is a pipe.

    Raises RuntimeError with the log if it has ended, and trio.TooSlowError.
    """
    output = b""
    assert process.stderr is not None
    with trio.fail_after(START_SECS):
        async for piece in process.stderr:
            output += piece
            if found := LISTENS.search(output):
                return found[1].decode()
    raise RuntimeError(f"the proxy did not start:\n{output.decode()}")
