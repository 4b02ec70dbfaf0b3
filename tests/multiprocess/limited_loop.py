"""An event loop whose epoll set can be full, as at the limit `fs.epoll.max_user_watches`."""

import errno
import os

from omni_proxy.dataplane.loop.event_loop import EventLoop


class LimitedLoop(EventLoop):
    """`full`: no further descriptor can be registered."""

    full = False

    def register(self, fd, handler):
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().register(fd, handler)
