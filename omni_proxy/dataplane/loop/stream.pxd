cimport cython

from omni_proxy.dataplane.loop.event_loop cimport EventLoop, PendingWriter
from omni_proxy.dataplane.loop.task cimport ConnectionTask, EventHandler

cdef class Stream(PendingWriter):
    cdef public EventLoop loop
    cdef public object sock
    cdef public int fd
    cdef public object recv
    cdef public object send
    cdef public bint readable
    cdef public bint peer_closed
    cdef public bint closed
    cdef public bytes pending
    cdef public EventHandler task
    cdef public double idle_since
    cdef public object on_idle_event

    cpdef on_event(self, int mask)
    cpdef write_soon(self, bytes chunk)
    @cython.locals(pending=bytes, sent=Py_ssize_t)
    cpdef flush(self)
    @cython.locals(chunk=bytes)
    cpdef read(self, Py_ssize_t size)


cdef class IoTask(ConnectionTask):
    cdef public double deadline

    cpdef set_timeout(self, str phase, double secs)
