"""What of the current request is forwarded to workers: path, query and header fields."""

from __future__ import annotations

from collections.abc import Iterable

from quart import request

from omni_proxy.admin_api.access.key_check import named_key
from omni_proxy.wire.header_fields import NOT_FORWARDED, as_texts

# Set for each worker, or not forwarded (note:omni-router 10).
_OWN_FIELDS = frozenset(
    (
        *as_texts(NOT_FORWARDED), "content-type", "accept-encoding", "remote-addr",
        "x-omni-received",
        # Set by browsers: the proxy has checked the origin, which is foreign to a worker.
        "origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest", "sec-fetch-user",
    )
)  # fmt: skip


def target_of(path: str) -> str:
    """The path with the request's query as received, without the proxy's own parameters."""
    query = request.query_string.decode("ascii", "ignore")
    parts = [part for part in query.split("&") if part and part.partition("=")[0] != "selector"]
    return f"{path}?{'&'.join(parts)}" if parts else path


def worker_headers(body: bytes) -> dict[str, str]:
    headers = forwarded_headers(request.headers)
    if body:
        headers["content-type"] = request.headers.get("Content-Type", "application/json")
    return headers


def forwarded_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The header fields of the current request that are forwarded to workers. They include the
    caller's Authorization, because workers may have the proxy's key, but no key of
    [[admin.keys]]."""
    lowered = ((name.lower(), value) for name, value in headers)
    return {
        name: value
        for name, value in lowered
        if name not in _OWN_FIELDS and not (name == "authorization" and named_key())
    }
