cdef class AdmissionLimits:
    cdef public double connect, response_head, first_byte, idle, client_idle, client_head
    cdef public double client_body, total
    cdef public object max_body
    cdef public Py_ssize_t held, in_flight
    cdef public double sse_keepalive, transfer, prefill_head

cdef class Settings:
    cdef public object _proxy_id, forwarded, callers, request_heads, config, routes, cors, tracing
    cdef public object fast_path_cache
    cdef public AdmissionLimits limits
    cdef public bint _has_ranks, _has_pools, half_close_aborts, access_log_is_json, counts_usage
    cdef public bint keeps_last_chunk
