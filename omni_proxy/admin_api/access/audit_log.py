"""The audit log: one JSON line for each call that changes something, refused calls included.

Invariant: a line contains no key and no secret of a query, is printable ASCII, and has a bounded
length. It is written when the response is known, or when the caller disconnects before that
(`status` is null then); writing it neither waits nor fails. There is no line for calls that only
read or pick a worker, for unknown routes and for /finish_session, which model clients send.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec
from quart import Quart, Response, g, request

from omni_proxy.admin_api.access.browser_checks import received_via
from omni_proxy.shared.log_text import ascii_json, mask_secrets
from omni_proxy.wire.proxy_protocol import FIELD

PATH_CHARS: Final = 2048


class AuditRecord(msgspec.Struct):
    """`who`: the name of the caller's key, None without a valid one. `client`: HOST:PORT, or `unix`
    for a client of a Unix socket. `path`: with its query. `status`: None if the caller disconnected
    before the response."""

    at: str
    who: str | None
    client: str | None = msgspec.field(name="from")
    method: str
    path: str
    status: int | None = None


class AuditLog:
    """Mounted on an app before all other hooks. `write` takes a line; `changes()` and `who()`
    describe the current request."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        changes: Callable[[], bool],
        who: Callable[[], str | None],
    ) -> None:
        self._write = write
        self._changes = changes
        self._who = who

    def mount(self, app: Quart) -> None:
        app.before_request(self._begin)
        app.after_request(self._end)
        app.teardown_request(self._abandon)

    async def _begin(self) -> None:
        if request.routing_exception is None and self._changes():
            g.audit_record = AuditRecord(
                at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                who=self._who(),
                client=_client(),
                method=request.method,
                path=mask_secrets(_target())[:PATH_CHARS],
            )

    async def _end(self, response: Response) -> Response:
        record: AuditRecord | None = g.pop("audit_record", None)
        if record is not None:
            record.status = response.status_code
            self._write(ascii_json(msgspec.json.encode(record)))
        return response

    async def _abandon(self, _: BaseException | None) -> None:
        record: AuditRecord | None = g.pop("audit_record", None)
        if record is not None:
            self._write(ascii_json(msgspec.json.encode(record)))


def _client() -> str | None:
    if received_via(request).local:
        return "unix"
    # The data plane's own field is the last one.
    return next(reversed(request.headers.getlist(FIELD.decode())), None)


def _target() -> str:
    """Path and query as received, still encoded."""
    path: bytes = request.scope.get("raw_path") or request.path.encode()
    query = request.query_string
    return (path + b"?" + query if query else path).decode("latin-1")
