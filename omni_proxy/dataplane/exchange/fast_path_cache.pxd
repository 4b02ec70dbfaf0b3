from omni_proxy.wire.scan.head_template cimport HeadTemplate

cdef class CachedRequest:
    cdef public object caller, decode, decode_ascii, head, route, sampled_below, source, tracing
    cdef public HeadTemplate template
    cdef public bint reads_plain_body, decodes_later
    cdef public Py_ssize_t trace_index
