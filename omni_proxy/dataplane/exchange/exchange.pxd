from omni_proxy.routing.inspect.requirements cimport Requirements

cdef class Exchange:
    cdef public double started_at, head_at, body_at, sent_at, response_head_at, first_at, ended_at
    cdef public double queued_secs, connect_secs, own_secs, longest_gap
    cdef public bint idempotency_key, admitted, relayed, single_chunk, stream
    cdef public Py_ssize_t attempts, half_open_id, held_bytes, status, bytes_in, bytes_out, chunks
    cdef public Py_ssize_t reserved
    cdef public bytes request_id, cors, request_id_line, last_chunk
    cdef public object body  # bytes, or a bytearray where it was read in parts
    cdef public Exchange spare_leg
    cdef public Requirements requirements
    cdef public list failed_attempts
    cdef public object client, method, target, trace, route, policy, caller
    cdef public object request_bucket, token_bucket, worker, rank, legs, last_worker, last_rank
    cdef public object weight_version, worker_seen, candidates, outcome, ended_by, error, phase

    cpdef recycle(self, double now)
    cpdef reset_result(self)


cdef class Recorders:
    cdef public object access_log, spans, route_log, meters
