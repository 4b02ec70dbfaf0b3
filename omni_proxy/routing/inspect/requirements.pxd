cdef class Requirements:
    cdef public Py_ssize_t mask
    cdef public object model
    cdef public bint stream
    cdef public str request_id
    cdef public object pinning
    cdef public str named_worker
    cdef public object decoded
    cdef public bytes undecoded
    cdef public str affinity_key
    cdef public object version_constraint
    cdef public tuple rids
    cdef public object adapters_in_large_body
    cdef public str large_body_class
    cdef public object given_hints
    cdef public tuple ranks_in_large_body
    cdef public Py_ssize_t dp_rank
    cdef public bint names_rank_in_body
    cdef public object legs, alias, prediction
