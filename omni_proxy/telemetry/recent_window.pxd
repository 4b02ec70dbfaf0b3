cdef class WindowCounts:
    cdef public Py_ssize_t requests, errors, failures
    cdef public double marked_at
    cdef public list firsts

cdef class RecentWindow:
    cdef public object points
    cdef public WindowCounts second
    cdef public list single_chunk_counts
    cdef public Py_ssize_t completed_left
    cdef public dict sums
    cdef public object gather
    cdef public double _began
    cdef public dict _marks
    cdef public object _ends, _failures
