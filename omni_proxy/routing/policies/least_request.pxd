from omni_proxy.fleet.worker cimport WorkerLoad

cdef class CandidateWeights:
    cdef public object _of
    cdef public bint even
    cdef public object total
    cdef public double mean

    cpdef bint take(self, candidates) except -1
