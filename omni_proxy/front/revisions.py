"""Revisions over HTTP: the ETag of answers, and what `If-Match` asks of a change.

The keeper compares, under its lock; here the header is only carried and the mismatch told.
"""

from __future__ import annotations

from quart import request

from omni_proxy.watch.keeper import Reloaded
from omni_proxy.wire.errors import Refusal


def etag(revision: int) -> dict[str, str]:
    return {"ETag": f'"{revision}"'}


def if_match() -> str | None:
    return request.headers.get("If-Match")


def refuse_mismatch(reloaded: Reloaded) -> None:
    """Raises Refusal 412."""
    if reloaded.outcome == "precondition_failed":
        raise Refusal(
            412,
            f"the configuration is at revision {reloaded.revision}, which If-Match does not name",
            "precondition_failed",
        ).with_headers(*etag(reloaded.revision).items())
