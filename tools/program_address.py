"""Where a proxy that a tool has started listens, read off its log.

Invariant: it reads no further than the line that says so; what comes later is the caller's.
"""

from __future__ import annotations

import re

import trio

LISTENS = re.compile(rb"listening on (http:[^\s\"]+)")
START_SECS = 30


async def program_address(process: trio.Process) -> str:
    """Its URL. Its stderr is a pipe. Raises RuntimeError with the log of one that has ended, and
    trio.TooSlowError."""
    output = b""
    assert process.stderr is not None
    with trio.fail_after(START_SECS):
        async for piece in process.stderr:
            output += piece
            if found := LISTENS.search(output):
                return found[1].decode()
    raise RuntimeError(f"the proxy did not start:\n{output.decode()}")
