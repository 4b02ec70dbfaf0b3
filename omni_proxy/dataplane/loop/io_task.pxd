from omni_proxy.dataplane.loop.task cimport ConnectionTask

cdef class IoTask(ConnectionTask):
    cdef public double deadline

    cpdef set_timeout(self, str phase, double secs)
