cdef class Timeouts:
    cdef public double connect, response_head, first_byte, idle, client_idle, client_head
    cdef public double client_body, total, sse_keepalive, transfer, prefill_head
