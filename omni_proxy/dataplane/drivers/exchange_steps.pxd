from omni_proxy.dataplane.exchange.exchange cimport Exchange
from omni_proxy.dataplane.exchange_io cimport ExchangeIO
from omni_proxy.routing.inspect.requirements cimport Requirements
from omni_proxy.dataplane.upstream.balancer cimport Balancer

cpdef set_requirements(ExchangeIO io, Exchange exchange, Requirements need, lines, body)
