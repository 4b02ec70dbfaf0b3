cimport cython

from omni_proxy.dataplane.exchange.exchange cimport Exchange, Recorders
from omni_proxy.fleet.registry cimport Fleet
from omni_proxy.fleet.worker cimport WorkerLoad
from omni_proxy.routing.inspect.requirements cimport Requirements
from omni_proxy.routing.pick cimport pick_worker

cdef class Balancer:
    cdef public object policy, pool_policies, affinity_keys, aliases, voices, response_owners
    cdef public bint is_plain, _had_aliases, always_special
    cdef public Fleet _fleet
    cdef public object _pairing, _policies
    cdef public double record_from
    cdef public Recorders _recorders

    @cython.locals(need=Requirements, fleet=Fleet, load=WorkerLoad, counts=list, index=Py_ssize_t)
    cpdef acquire(self, Exchange exchange, tried=*)
    @cython.locals(counts=list, index=Py_ssize_t)
    cpdef release(self, Exchange exchange, worker, Py_ssize_t result)
