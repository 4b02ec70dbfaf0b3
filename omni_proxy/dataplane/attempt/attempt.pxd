cimport cython

from omni_proxy.dataplane.exchange.exchange cimport Exchange
from omni_proxy.dataplane.exchange_io cimport AttemptIO
from omni_proxy.dataplane.loop.event_loop cimport EventLoop
from omni_proxy.dataplane.loop.stream cimport Stream
from omni_proxy.dataplane.upstream.pool cimport UpstreamPool
from omni_proxy.wire.head_caching.response_heads cimport CachedResponseHead

cpdef tuple length_lines(Py_ssize_t size)
cpdef bytes encode_request(bytes own_lines, list lines, bytes length_line, bytes body)
@cython.locals(loop=EventLoop, now=double, due=double)
cpdef start_waiting(AttemptIO io, Exchange exchange, double secs)
@cython.locals(template=CachedResponseHead, head=bytes, body=bytes, digits=bytes, size=Py_ssize_t)
cpdef bytes read_complete_response(UpstreamPool pool, bytes chunk, heads, fleet)
