import subprocess
import sys
from functools import partial

import pytest
import trio

from tools.program_address import program_address

LINE = "INFO listener_opened url=http://127.0.0.1:4711 purpose=requests"


async def started(nursery, line):
    command = [sys.executable, "-S", "-c", f"import sys; print({line!r}, file=sys.stderr)"]
    spawn = partial(trio.run_process, command, stderr=subprocess.PIPE)
    return await nursery.start(spawn)


async def test_the_address_is_read_from_the_log():
    async with trio.open_nursery() as nursery:
        assert await program_address(await started(nursery, LINE)) == "http://127.0.0.1:4711"


async def test_the_log_of_a_program_that_ends_is_in_the_error():
    async with trio.open_nursery() as nursery:
        process = await started(nursery, "no such file")
        with pytest.raises(RuntimeError, match="no such file"):
            await program_address(process)
