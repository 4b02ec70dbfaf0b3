cdef class CachedResponseHead:
    # In the order of the class: its __init__ takes them by place.
    cdef public bytes start, end
    cdef public Py_ssize_t status
    cdef public bytes lines
    cdef public bint keep_alive, sse, plain
