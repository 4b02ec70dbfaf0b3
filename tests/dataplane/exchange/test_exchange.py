import contextlib

from omni_proxy.dataplane.exchange.exchange import Exchange

# Facts of the head, and fields that each request on the fast path sets before they are read.
KEPT = {
    "started_at", "head_at", "body_at", "client", "method", "target", "route", "idempotency_key",
    "request_id", "policy", "weight_version", "worker_seen", "stream", "bytes_in", "ended_at",
    "caller", "reserved", "request_bucket", "token_bucket", "spare_leg", "trace",
}  # fmt: skip
# Fields that the end of an exchange clears.
CLEARED = {
    "requirements", "last_worker", "last_rank", "rank", "last_chunk", "admitted", "held_bytes"
}  # fmt: skip
# Fields that the fast path never sets: exchanges that need one continue in the coroutine.
NEVER_SET = {
    "body", "connect_secs", "cors", "ended_by", "error", "half_open_id", "longest_gap",
    "queued_secs", "request_id_line", "failed_attempts", "worker", "legs",
}  # fmt: skip


def set_any(exchange, name):
    """Set the field to a value that no new exchange has. In the native build fields have types."""
    for value in (object(), 7, b"7", Exchange(1.0, "client")):
        with contextlib.suppress(TypeError):
            setattr(exchange, name, value)
            return
    raise AssertionError(name)


def test_recycling_resets_all_fields_that_requests_do_not_always_set():
    used, new = Exchange(1.0, "client"), Exchange(1.0, "client")
    for name in set(Exchange.__slots__) - NEVER_SET - CLEARED:
        set_any(used, name)
    used.recycle(1.0)
    used.reset_result()
    differing = {
        name for name in Exchange.__slots__ if getattr(used, name) != getattr(new, name)
    } - {"started_at"}
    assert differing == KEPT - {"started_at"}
