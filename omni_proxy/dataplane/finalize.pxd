from omni_proxy.dataplane.exchange.exchange cimport Exchange
from omni_proxy.dataplane.services cimport ExchangeServices

cpdef finalize(ExchangeServices services, Exchange exchange, phase, bint has_extras=*)
