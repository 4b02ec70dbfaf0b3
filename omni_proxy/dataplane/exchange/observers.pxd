cdef class Recorders:
    cdef public object access_log, spans, route_log, meters
