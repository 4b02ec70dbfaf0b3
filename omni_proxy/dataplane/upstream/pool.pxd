from omni_proxy.dataplane.loop.event_loop cimport EventLoop
from omni_proxy.dataplane.loop.stream cimport Stream
from omni_proxy.dataplane.loop.task cimport EventHandler
from omni_proxy.wire.head_caching.response_heads cimport CachedResponseHead

cdef class UpstreamPool:
    cdef public object _address, worker
    cdef public CachedResponseHead response_template
    cdef public EventLoop loop
    cdef public bytes own_lines, hop_line
    cdef public bint asks_for_load, closed
    cdef public list idle

    cpdef reuse(self, EventHandler task)
    cpdef release(self, Stream stream)

cdef class AdminApiPool(UpstreamPool):
    pass

cdef class TlsUpstreamPool(UpstreamPool):
    cdef public object _context, _name, _session, ca, verify

cdef class RankPool(UpstreamPool):
    cdef public UpstreamPool _of_worker

cdef class UpstreamPools:
    cdef public EventLoop _loop
    cdef public bint _asks_for_load
    cdef public dict known
    cdef public object _members
    cdef public UpstreamPool admin_api, admin_listener, metrics_listener

    cpdef UpstreamPool of(self, worker)
