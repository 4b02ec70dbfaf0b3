cdef class WorkerLoad:
    cdef public list counts
    # Shared ones are written by a property, so typed code may read it, and must not write it.
    cdef public Py_ssize_t in_flight
    cdef public double load_offset
    cdef public Py_ssize_t peak_in_flight
