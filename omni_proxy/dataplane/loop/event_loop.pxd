cimport cython

cdef class IoHandler:
    cpdef on_event(self, int mask)

cdef class PendingWriter(IoHandler):
    cpdef flush(self)

cdef class EventLoop:
    cdef public object clock
    cdef public double now
    cdef public object tasks
    cdef public Py_ssize_t side_tasks
    cdef public bint ended
    cdef public Py_ssize_t admin_exchanges
    cdef public Py_ssize_t failures
    cdef public object tasks_ended
    cdef public object _epoll
    cdef public list _closing
    cdef public list pending_writers
    cdef public bint _ended_early
    cdef public list _unhandled
    cdef public list _ready
    cdef public double _trio_checked_at
    cdef public object _trio
    cdef public bint _parked
    cdef public int _wakeup_fd
    cdef public list _handlers

    @cython.locals(writer=PendingWriter)
    cpdef flush_writes(self)
    cpdef call_soon(self, task)
    cpdef wake(self, task)
    cpdef flush(self)
    @cython.locals(handler=IoHandler, handlers=list, fd=Py_ssize_t, mask=int, rest=list)
    cpdef _run_batch(self, list events)
    @cython.locals(handler=IoHandler, handlers=list, fd=Py_ssize_t, mask=int, events=list)
    cpdef _continue_batch(self, list rest)
    @cython.locals(until=double, count=Py_ssize_t)
    cpdef _step_many(self, list ready)
