"""Request heads: judged whole, cleaned once, kept as the bytes a worker will get.

Invariant: a `RequestHead` has exactly one meaning. Whatever two parsers could read differently
(lengths that disagree, folded lines, bare line ends, a second Host) is refused here and never
reaches a worker. llhttp judges; one regular expression finds the fields that are ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import httptools

from omni_proxy.wire.errors import Refusal

MAX_HEAD_BYTES = 65536
MAX_TARGET_BYTES = 16384
CHUNKED = -1

HINT_PREFIX = b"x-sglang-omni-route-"

# Fields that end at us (RFC 9110 7.6.1) or are written anew; the last group is read and passed on.
_OURS = re.compile(
    rb"\r\n(?i:(connection|keep-alive|proxy-authenticate|proxy-authorization|proxy-connection|te"
    rb"|trailers?|transfer-encoding|upgrade|host|content-length|expect"
    rb"|x-sglang-omni-route-(?:model|stream|capabilities|worker))"
    rb"|(content-type|x-sglang-omni-request-id|x-request-id|x-correlation-id"
    rb"|idempotency-key|sec-websocket-key))[ \t]*:[ \t]*([^\r\n]*)"
)
_TARGET = re.compile(rb"[!-~]+\Z")
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(?::[0-9]{0,5})?\Z")
_LENGTH = re.compile(rb"[0-9]{1,18}\Z")
_REQUEST_ID_FIELDS = (b"x-sglang-omni-request-id", b"x-request-id", b"x-correlation-id")
_PLAIN_CONNECTION = frozenset((b"", b"keep-alive", b"close", b"upgrade"))


@dataclass(slots=True)
class RequestHead:
    """What the rest of the program may know of a request's head."""

    method: bytes
    target: bytes  # origin form, as it will be sent on
    lines: bytes  # request line and the client's own fields, each ended by CRLF
    keep_alive: bool
    http_1_0: bool
    length: int  # bytes of body; CHUNKED where only the end tells
    expects_continue: bool = False
    upgrade: bytes = b""
    host: bytes = b""
    content_type: bytes = b""
    request_id: bytes = b""
    websocket_key: bytes = b""
    idempotency_key: bool = False
    hints: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]


class _Judge:
    """llhttp's listener: it only has to exist, we ask the parser itself."""

    __slots__ = ("target",)

    def __init__(self) -> None:
        self.target = b""

    def on_url(self, url: bytes) -> None:
        self.target += url


def _bad(message: str, code: str = "malformed_request") -> Refusal:
    return Refusal(400, message, code, close=True)


def find_end(buffer: bytes | bytearray, searched: int = 0) -> int:
    """Where the head ends (past its blank line), 0 while it isn't whole.

    `searched` bytes were looked at before. Raises Refusal 414 or 431 when no end can come any more,
    and 400 at once for bytes that can't begin a request (TLS).
    """
    end = buffer.find(b"\r\n\r\n", max(0, searched - 3))
    if 0 <= end <= MAX_HEAD_BYTES - 4:
        return end + 4
    if buffer[:1] == b"\x16":
        raise _bad("this listener speaks plain HTTP, and TLS bytes came", "tls_on_plain_port")
    if end < 0 and len(buffer) <= MAX_HEAD_BYTES:
        if len(buffer) > MAX_TARGET_BYTES + 64 and buffer.find(b"\r\n", 0, MAX_TARGET_BYTES) < 0:
            raise Refusal(414, "the request target is too long", "target_too_long", close=True)
        if b"\n\n" in buffer or buffer.startswith(b"\n"):
            raise _bad("lines must end with CRLF")
        return 0
    raise Refusal(
        431, f"the request head is larger than {MAX_HEAD_BYTES} bytes", "head_too_large", close=True
    )


def judge(head: bytes) -> RequestHead:
    """Read one whole head (ends with its blank line). Raises Refusal for what must not pass."""
    if head.startswith(b"PRI * HTTP/2"):
        raise Refusal(505, "HTTP/2 is not spoken here", "http_version", close=True)
    listener = _Judge()
    parser = httptools.HttpRequestParser(listener)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # llhttp stops here so that we can decide: `upgrade` below
    except httptools.HttpParserError as error:
        raise _bad(f"malformed request head: {error}") from None
    if b"\r\n " in head or b"\r\n\t" in head:
        raise _bad("folded header lines are not accepted")  # RFC 9112 5.2
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise Refusal(505, f"HTTP/{version} is not spoken here", "http_version", close=True)
    method = parser.get_method()
    if method in (b"CONNECT", b"TRACE"):
        raise Refusal(
            405,
            f"{method.decode()} is not served",
            "method_not_allowed",
            close=True,
            detail="Method Not Allowed",
        )
    lines, fields = _split(head)
    host = _host(fields, optional=version == "1.0")
    target = _origin_form(listener.target, method, host)
    nominated = _nominated(fields)
    if not _PLAIN_CONNECTION.issuperset(nominated):
        lines = drop_fields(lines, frozenset(nominated))
    expect = fields.get(b"expect")
    if expect and expect[0].lower() != b"100-continue":
        raise Refusal(417, "only 100-continue can be expected", "expectation", close=True)
    return RequestHead(
        method=method,
        target=target,
        lines=b"%b %b HTTP/1.1\r\n%b" % (method, target, lines),
        keep_alive=parser.should_keep_alive(),
        http_1_0=version == "1.0",
        length=_length(fields, version),
        host=host,
        expects_continue=expect is not None,
        upgrade=_first(fields, b"upgrade").lower() if b"upgrade" in nominated else b"",
        content_type=_first(fields, b"content-type"),
        request_id=_request_id(fields),
        websocket_key=_first(fields, b"sec-websocket-key"),
        idempotency_key=b"idempotency-key" in fields,
        hints={
            name[len(HINT_PREFIX) :]: values[0]
            for name, values in fields.items()
            if name.startswith(HINT_PREFIX)
        },
    )


_Fields = dict[bytes, list[bytes]]


def _split(head: bytes) -> tuple[bytes, _Fields]:
    """The client's own field lines without those that end here, and every field that we read."""
    kept: list[bytes] = []
    fields: _Fields = {}
    at = head.index(b"\r\n")  # the request line is written anew
    for found in _OURS.finditer(head, at):
        ours, passed, value = found.groups()
        fields.setdefault((ours or passed).lower(), []).append(value.rstrip(b" \t"))
        if ours is not None:
            kept.append(head[at : found.start()])
            at = found.end()
    kept.append(head[at:-2])
    return b"".join(kept)[2:], fields


def _first(fields: _Fields, name: bytes) -> bytes:
    values = fields.get(name)
    return values[0] if values else b""


def _nominated(fields: _Fields) -> list[bytes]:
    values = fields.get(b"connection")
    if not values:
        return []
    return [token.strip().lower() for value in values for token in value.split(b",")]


def _length(fields: _Fields, version: str) -> int:
    lengths = fields.get(b"content-length", [])
    codings = fields.get(b"transfer-encoding", [])
    if lengths and codings:
        raise _bad("content-length and transfer-encoding together")  # RFC 9112 6.3: smuggling
    if len(lengths) > 1 or len(codings) > 1:
        raise _bad("the body's length is said twice")
    if lengths:
        if not _LENGTH.match(lengths[0]):
            raise _bad("content-length is not a plain number")
        return int(lengths[0])
    if not codings:
        return 0
    if version == "1.0":
        raise _bad("HTTP/1.0 has no transfer-encoding")
    if codings[0].lower() != b"chunked":
        raise Refusal(501, "transfer-encoding must be chunked", "transfer_encoding", close=True)
    return CHUNKED


def _host(fields: _Fields, *, optional: bool) -> bytes:
    hosts = fields.get(b"host", [])
    if len(hosts) > 1 or not (hosts or optional):
        raise _bad("a request needs exactly one Host")  # RFC 9112 3.2
    host = hosts[0] if hosts else b""
    if not _HOST.match(host):
        raise _bad("the Host is not valid")
    return host


def _request_id(fields: _Fields) -> bytes:
    return next((fields[name][0] for name in _REQUEST_ID_FIELDS if fields.get(name, [b""])[0]), b"")


def _origin_form(target: bytes, method: bytes, host: bytes) -> bytes:
    if not _TARGET.match(target):
        raise _bad("the request target holds bytes that may not stand there")
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target
    scheme, found, rest = target.partition(b"://")
    if not found or scheme.lower() not in (b"http", b"https"):
        raise _bad("the request target must begin with a slash")
    authority, slash, path = rest.partition(b"/")
    if authority.lower() != host.lower():
        raise _bad("the target names another host than the Host field")
    return slash + path or b"/"


def drop_fields(lines: bytes, names: frozenset[bytes]) -> bytes:
    """Field lines without those of these lower-case names (RFC 9110 7.6.1 for nominated ones)."""
    kept = [
        line
        for line in lines.split(b"\r\n")
        if line.partition(b":")[0].strip().lower() not in names
    ]
    return b"\r\n".join(kept)


def with_bearer(lines: bytes, key: bytes) -> bytes:
    """Field lines with this key as their one authorization."""
    kept = drop_fields(lines, frozenset((b"authorization",)))
    return b"%bauthorization: Bearer %b\r\n" % (kept, key)
