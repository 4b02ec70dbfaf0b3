from omni_proxy.dataplane.loop.event_loop cimport EventLoop

cdef class EventHandler:
    cdef public object client
    cdef public object waiting_on

    cpdef step(self, error=*)


cdef class ConnectionTask(EventHandler):
    cdef public EventLoop loop
    cdef public double phase_deadline
    cdef public object phase
    cdef public double started_at
    cdef public Py_ssize_t reads_since_pause
    cdef public object _coro
    cdef public list _callers

    cpdef bint must_wait_for(self, stream)
    cpdef bint count_read(self)
    cpdef step(self, error=*)
