from omni_proxy.dataplane.admission.inflight cimport InFlight
from omni_proxy.dataplane.exchange.exchange cimport Recorders
from omni_proxy.dataplane.loop.event_loop cimport EventLoop
from omni_proxy.dataplane.settings cimport Settings
from omni_proxy.dataplane.upstream.balancer cimport Balancer
from omni_proxy.dataplane.upstream.pool cimport UpstreamPools
from omni_proxy.fleet.registry cimport Fleet

cdef class Totals:
    cdef public Py_ssize_t accepted, failed_handshakes, failed_proxy_headers, across_versions
    cdef public object ended

cdef class ExchangeServices:
    cdef public EventLoop loop
    cdef public Fleet fleet
    cdef public Settings settings
    cdef public InFlight inflight
    cdef public Balancer balancer
    cdef public object queue
    cdef public UpstreamPools upstream_pools
    cdef public object response_heads, timers
    cdef public Recorders recorders
    cdef public Totals totals
    cdef public object keep_voices_at, random_below, engine_ids
