from omni_proxy.dataplane.exchange.exchange cimport Exchange
from omni_proxy.dataplane.loop.stream cimport IoTask, Stream
from omni_proxy.dataplane.services cimport ExchangeServices
from omni_proxy.dataplane.settings cimport Settings

cdef class AttemptIO(IoTask):
    cdef public object connections, body_stream, keepalive
    cdef public ExchangeServices services
    cdef public Settings settings
    cdef public Stream upstream

cdef class ExchangeIO(AttemptIO):
    cdef public object role, peer, watch
    cdef public Exchange exchange
    cdef public bint close_after_response
    cdef public bytes unread
    cdef public Py_ssize_t head_bytes

    cpdef await_next_request(self)
