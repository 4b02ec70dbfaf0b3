cimport cython

from omni_proxy.dataplane.exchange.exchange cimport Exchange
from omni_proxy.telemetry.bucket_index cimport bucket_of
from omni_proxy.telemetry.recent_window cimport RecentWindow

cdef class RoutePhases:
    cdef public list heads, own
    cdef public object connect, head, longest_gap, overhead, queue

cdef class SingleChunkCounts:
    cdef public Py_ssize_t bytes_in, bytes_out
    cdef public object model, model_key
    cdef public RoutePhases phases
    cdef public list single_chunk_counts
    cdef public double single_chunk_secs

cdef class RouteSeries(SingleChunkCounts):
    cdef public object between, total, first, tokens
    cdef public Py_ssize_t cached_tokens, prompt_tokens, chunks
    cdef public dict ends

cdef class Metrics:
    cdef public object _clock, failed_attempts, ejections, health_changes, exemplars
    cdef public Py_ssize_t retries, _at_once
    cdef public object alias_targets, legs
    cdef public Py_ssize_t transfer_failures
    cdef public object fallbacks, cached_tokens
    cdef public dict _phases, _series
    cdef public object _fleet
    cdef public RecentWindow _recent
    cdef public object _members, _models, _labels

    cpdef series_for(self, route, worker)
    cpdef _count_any(self, Exchange exchange, worker, RouteSeries cell)
    cpdef _count_recent(self, Exchange exchange, worker, Py_ssize_t index)
    @cython.locals(cell=RouteSeries, ended=double, started=double, secs=double,
                   recent=RecentWindow, proxy_secs=list, index=Py_ssize_t)
    cpdef record(self, Exchange exchange, worker)

cpdef bint _was_single_chunk(Exchange exchange)
