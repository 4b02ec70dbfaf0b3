"""A request to pick a worker for: the head and the body that the worker will get. No I/O.

The body of POST /select and /select_and_reserve is the model request itself with some additional
keys (features.md 10), or it has the model request under `request`. Invariant: the body's bytes are
those that the caller sent, so it is inspected exactly like a relayed request.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Final

import msgspec

from omni_proxy.wire.bounded_json import TooManyValues
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead, parse_request_head

DEFAULT_PATH: Final = "/v1/chat/completions"
MAX_LEASE_SECS: Final = 86400.0
MAX_ID_CHARS: Final = 256
_ABSENT: Final = msgspec.Raw()
# Headers that are replaced (the length), or that belong to a connection.
_NOT_COPIED: Final = frozenset(
    ("content-length", "transfer-encoding", "connection", "expect", "upgrade", "host")
)

Id = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)]


class PickRequest(msgspec.Struct, gc=False):
    """`session`: the affinity key, b"" to read it from head and body.

    `model`: the model if the body names none. `as_caller`: [[keys]] apply, as on a model route.
    `takes_pair`: the sender can pass the prefill worker's address to the decode worker.
    """

    head: RequestHead
    body: bytes
    session: bytes = b""
    model: str = ""
    client: str = "-"
    as_caller: bool = False
    takes_pair: bool = False


class _SelectBody(msgspec.Struct, gc=False):
    """The keys of a selection; other keys belong to the model request."""

    selection_id: Id = ""
    lease_secs: float | None = None
    path: str = DEFAULT_PATH
    session_id: str = ""
    model_name: str = ""
    headers: dict[str, str] = {}
    request: msgspec.Raw = _ABSENT


class Selection(msgspec.Struct, gc=False):
    """A parsed body of /select or /select_and_reserve; `lease_secs` None for the default."""

    request: PickRequest
    selection_id: str = ""
    lease_secs: float | None = None


_decode: Final = msgspec.json.Decoder(_SelectBody).decode


def read_selection(body: bytes) -> Selection:
    """Parse the body. Raises HttpError 400 with the key that is wrong."""
    try:
        asked = _decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TooManyValues) as error:
        raise _bad(f"the body is not a selection: {error}", "invalid_json") from None
    lease = asked.lease_secs
    if lease is not None and not (isfinite(lease) and 0 < lease <= MAX_LEASE_SECS):
        raise _bad(f"lease_secs must be a number above 0, up to {MAX_LEASE_SECS:g}")
    if asked.selection_id and not asked.selection_id.isprintable():
        raise _bad("selection_id must be printable text")
    if not asked.path.startswith("/"):
        raise _bad(f"path must be a model route, such as {DEFAULT_PATH}", "unknown_path")
    content = bytes(asked.request) if len(asked.request) else body
    request = PickRequest(
        head=head_of("POST", asked.path, asked.headers, len(content)),
        body=content,
        session=asked.session_id.strip(" \t").encode("utf-8", "surrogatepass"),
        model=asked.model_name,
    )
    return Selection(request, asked.selection_id, lease)


def head_of(method: str, target: str, headers: dict[str, str], length: int) -> RequestHead:
    """Build a request head from its parts. Raises HttpError 400."""
    lines = [f"{method} {target} HTTP/1.1", "host: picker", f"content-length: {length}"]
    names = set()
    for name, value in headers.items():
        lowered = name.lower()
        if lowered not in _NOT_COPIED:
            names.add(lowered)
            lines.append(f"{name}: {value}")
    if "content-type" not in names:
        lines.append("content-type: application/json")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1:
        raise _bad("headers must not contain a line break")
    try:
        raw = text.encode("latin-1")
    except UnicodeEncodeError:
        raise _bad("headers must be Latin-1") from None
    return parse_request_head(raw + b"\r\n\r\n")


def _bad(message: str, code: str = "invalid_request") -> HttpError:
    return HttpError(400, message, code)
