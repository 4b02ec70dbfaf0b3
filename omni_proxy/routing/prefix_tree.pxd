cimport cython

cpdef Py_ssize_t common_length(bytes label, bytes text, Py_ssize_t offset)

cdef class PrefixTree:
    cdef public Py_ssize_t max_size, size, nodes, membership
    cdef public dict _bits
    cdef public list _names
    cdef public dict _sizes
    cdef public object _live, _dead, _sweeping
    cdef public Py_ssize_t _cursor
    cdef public list _discarded
    cdef public tuple _named
    cdef public Py_ssize_t _generation
    cdef public list _lost
    cdef public list _labels, _masks, _edges
    cdef public object _parents, _child_counts, _used, _generations, _older, _newer, _free

    @cython.locals(edges=list, labels=list, masks=list, node=Py_ssize_t, offset=Py_ssize_t, end=Py_ssize_t, label=bytes)
    cpdef match(self, bytes text, among=*)
    @cython.locals(edges=list, labels=list, masks=list, node=Py_ssize_t, offset=Py_ssize_t, end=Py_ssize_t, label=bytes, held_length=Py_ssize_t, grown=Py_ssize_t, path=list)
    cpdef insert(self, bytes text, holder, Py_ssize_t number=*)
    cpdef _maintain(self)
    cpdef _use(self, list path, number)
