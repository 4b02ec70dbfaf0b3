import errno
import os

import trio

from omni_proxy.multiprocess.aggregate import _state
from omni_proxy.multiprocess.ipc import DrainCommand
from omni_proxy.multiprocess.process_slot import ProcessSlot


async def test_a_process_that_could_not_start_is_retried_and_gets_no_commands(nursery):
    """Its memory could not be had, say: no process was ever started."""
    slot, ended, buried = ProcessSlot(1), [], trio.Event()

    def begin(handle):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def on_process_exit(slot, handle):
        ended.append(handle)
        buried.set()

    nursery.start_soon(slot.run_until_retired, begin, lambda handle, message: None, on_process_exit)
    await buried.wait()
    (handle,) = ended
    assert _state(slot) == "backing_off"
    assert handle.send(DrainCommand()) == 0
    assert (handle._channel.waiting_bytes, handle._theirs.fileno()) == (0, -1)
    await handle.wait_acknowledged(1)  # nobody waits for it
    assert (slot.restarts, slot.last_error) == (1, "could not be started: Too many open files")
    slot.retire()
