import errno
import os

import trio

from omni_proxy.multiprocess.ipc.messages import DrainCommand
from omni_proxy.multiprocess.process_slot import ProcessSlot


async def test_a_process_that_could_not_start_is_retried_and_gets_no_commands(nursery):
    """For example, its shared memory could not be allocated."""
    slot, exited, exit_handled = ProcessSlot(1), [], trio.Event()
    descriptors = os.listdir("/proc/self/fd")

    def fail(handle):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def on_process_exit(slot, handle):
        exited.append(handle)
        exit_handled.set()

    nursery.start_soon(slot.run_until_retired, fail, lambda handle, message: None, on_process_exit)
    await exit_handled.wait()
    (handle,) = exited
    assert slot.state == "backing_off"
    assert handle.send(DrainCommand()) == 0
    assert handle.sent == 0
    assert os.listdir("/proc/self/fd") == descriptors  # both ends of its socket are closed
    await handle.wait_acknowledged(1)  # returns at once
    assert (slot.restarts, slot.last_error) == (1, "could not be started: Too many open files")
    slot.retire()
