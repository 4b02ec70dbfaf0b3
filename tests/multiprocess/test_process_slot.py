import errno
import os

import trio

from omni_proxy.multiprocess.aggregate import _state
from omni_proxy.multiprocess.messages import DrainCommand
from omni_proxy.multiprocess.process_slot import ProcessSlot


async def test_a_door_that_could_not_begin_waits_for_its_next_try_and_hears_nothing(nursery):
    """Its memory could not be had, say: no process was ever started."""
    seat, ended, buried = ProcessSlot(1), [], trio.Event()

    def begin(link):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def bury(seat, link):
        ended.append(link)
        buried.set()

    nursery.start_soon(seat.keep, begin, lambda link, message: None, bury)
    await buried.wait()
    (link,) = ended
    assert _state(seat) == "backing_off"
    assert link.tell(DrainCommand()) == 0
    assert (link._channel.waiting_bytes, link._theirs.fileno()) == (0, -1)
    await link.acknowledged(1)  # nobody waits for it
    assert (seat.restarts, seat.last_error) == (1, "could not be started: Too many open files")
    seat.retire()
