"""Marks that end a loop over several proxies.

The control routes of a proxy say in each answer that they are an omni-proxy, and which one, so a
probe finds out which workers are proxies themselves. Requests to those carry a mark, one field line
that is the same for all, behind the marks of the proxies before; whoever gets its own mark back
answers 508. Invariant: a worker that is no omni-proxy gets no mark, and no request pays for it.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.wire.errors import HttpError

HOP_FIELD: Final = "x-omni-hop"  # in requests: the id of each proxy that it came through
PROXY_FIELD: Final = "x-omni-proxy"  # in answers of control routes: the id of the proxy


def hop_line(proxy_id: str) -> bytes:
    return f"{HOP_FIELD}: {proxy_id}\r\n".encode("ascii")


def refuse_loop(head: bytes, proxy_id: bytes) -> None:
    """Raises HttpError 508 for a request that has been here before. An id is random: it is looked
    for anywhere in the head."""
    if proxy_id and proxy_id in head:
        told = "this request came back to the proxy: some worker leads to the proxy itself"
        raise HttpError(508, told, "loop_detected", close=True)
