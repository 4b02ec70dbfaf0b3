from omni_proxy.dataplane.exchange.exchange cimport Exchange
from omni_proxy.dataplane.exchange_io cimport ExchangeIO
from omni_proxy.dataplane.loop.stream cimport Stream

cpdef tuple diagnostic_fields(Exchange exchange)
