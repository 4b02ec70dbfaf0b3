cimport cython

from omni_proxy.dataplane.exchange.exchange cimport Exchange
from omni_proxy.dataplane.exchange_io cimport ExchangeIO
from omni_proxy.dataplane.finalize cimport finalize
from omni_proxy.dataplane.drivers.exchange_steps cimport set_requirements
from omni_proxy.dataplane.exchange.fast_path_cache cimport CachedRequest
from omni_proxy.dataplane.relay.response_relay cimport diagnostic_fields
from omni_proxy.dataplane.loop.stream cimport Stream
from omni_proxy.dataplane.loop.task cimport EventHandler
from omni_proxy.dataplane.services cimport ExchangeServices
from omni_proxy.dataplane.upstream.balancer cimport Balancer
from omni_proxy.dataplane.attempt.attempt cimport (
    encode_request, length_lines, read_complete_response, start_waiting,
)
from omni_proxy.dataplane.upstream.pool cimport UpstreamPool
from omni_proxy.wire.head_caching.response_heads cimport CachedResponseHead
from omni_proxy.routing.inspect.requirements cimport Requirements
from omni_proxy.routing.inspect.plain_body cimport read_plain_body
from omni_proxy.wire.scan.head_template cimport HeadTemplate

cdef class FastPath(EventHandler):
    cdef public ExchangeIO _io
    cdef public UpstreamPool _pool
    cdef public Exchange _spare
    cdef public bytes _request, _received
    cdef public CachedRequest cached
    cdef public object error

    @cython.locals(stream=Stream, exchange=Exchange, io=ExchangeIO)
    cpdef step(self, error=*)
    cpdef _wait_on(self, Stream stream)
    cpdef Exchange _new_exchange(self)
    @cython.locals(exchange=Exchange, template=HeadTemplate, head=bytes, body=bytes, size=Py_ssize_t,
                   lines=list, digits=bytes, length_line=bytes, upstream=Stream, pool=UpstreamPool,
                   balancer=Balancer, need=Requirements, services=ExchangeServices)
    cpdef bint _send(self, bytes chunk) except -1
    cpdef bint _send_legs(self, Exchange exchange, list lines, bytes body) except -1
    @cython.locals(template=CachedResponseHead, body=bytes, length_line=bytes, size=Py_ssize_t,
                   client=Stream, services=ExchangeServices)
    cpdef bint _relay(
        self, Exchange exchange, Stream upstream, bytes chunk, bint sent_at_once=*
    ) except -1
