from omni_proxy.dataplane.timeouts cimport Timeouts

cdef class RequestLimits:
    cdef public object max_body
    cdef public Py_ssize_t held, in_flight

cdef class Settings:
    cdef public object _proxy_id, forwarded, callers, request_heads, config, routes, cors, tracing
    cdef public object fast_path_cache
    cdef public RequestLimits limits
    cdef public Timeouts timeouts
    cdef public bint _has_ranks, _has_pools, _reads_prompts, half_close_aborts, access_log_is_json, counts_usage
    cdef public bint keeps_last_chunk
