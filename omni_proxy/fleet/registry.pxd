cdef class Fleet:
    cdef public Py_ssize_t revision
    cdef public object await_replicated, await_cluster, thresholds, loads
    cdef public bint has_inflight_limits, has_ranks, has_named_models, has_adapters, has_pools
    cdef public bint had_workers, _has_base_models
    cdef public dict _by_url
    cdef public object models, _adapters
    cdef public dict candidate_cache, _pools, _known_ranks
    cdef public list _watchers, _member_watchers, _worker_watchers, _health_watchers
    cdef public list _ejection_watchers, _cache_watchers, _replaced_watchers

    cpdef list candidates(self, model, mask)
