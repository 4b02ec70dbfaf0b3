cimport cython

from omni_proxy.dataplane.exchange.exchange cimport Exchange
from omni_proxy.dataplane.settings cimport RequestLimits, Settings

cdef class InFlight:
    # `in_flight` is in the dict: with several processes a property stands in its place.
    cdef dict __dict__
    cdef public Settings _settings
    cdef public bint draining, closes_idle
    cdef public Py_ssize_t elsewhere, peak_in_flight, rejected, held_bytes

    @cython.locals(limits=RequestLimits, held_bytes=Py_ssize_t, bound=Py_ssize_t, before=Py_ssize_t)
    cpdef bint admit(self, Exchange exchange, Py_ssize_t request_bytes=*) except -1
