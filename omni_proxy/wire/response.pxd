cdef class UpstreamResponse:
    cdef public object parser, framing
    cdef public Py_ssize_t status, remaining
    cdef public bytes lines, refused
    cdef public bint keep_alive, sse, is_complete, excess, between

    cpdef bytes feed(self, bytes piece)
