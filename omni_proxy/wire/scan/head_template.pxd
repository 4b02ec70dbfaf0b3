cdef class HeadTemplate:
    cdef public bytes first, last
    cdef public tuple steps
    cdef public bint counted
    cdef public Py_ssize_t id_index

    cpdef list match(self, bytes head, bytes length)
