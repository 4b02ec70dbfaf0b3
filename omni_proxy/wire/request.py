"""Request heads: validated as a whole, cleaned once, stored as the bytes that a worker gets.

Invariant: a `RequestHead` has exactly one meaning. A head that two parsers could read differently
(contradicting lengths, folded lines, bare line feeds, a second Host) is refused here and never
reaches a worker. llhttp parses; one regular expression finds the fields that the proxy handles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import httptools
import msgspec

from omni_proxy.shared.log_text import mask_secrets
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.header_fields import (
    HINTS,
    LOAD_HINT,
    MIN_EPOCH_NAME,
    NOT_FORWARDED,
    RANK_HINT,
    RANK_NAME,
    READ_AND_FORWARDED,
    REQUEST_ID_FIELDS,
    VERSION_NAME,
)
from omni_proxy.wire.load_report import LOAD_FORMAT_NAME
from omni_proxy.wire.scan.head_template import HeadTemplate

_CRLF: Final = b"\r\n"
# Bytes that a varying value must not contain: CONTROLS in a field that is forwarded unread
# (RFC 9110 5.5), CONTROLS_AND_SPACES in a field that may be the request id, which does not include
# surrounding spaces. The cost of the check grows with their number.
CONTROLS: Final = bytes(range(0x09)) + bytes(range(0x0A, 0x20)) + b"\x7f"
CONTROLS_AND_SPACES: Final = CONTROLS + b"\t "
# Used instead of those if the value is the content-length.
COUNT: Final = b""

MAX_HEAD_BYTES = 65536
MAX_TARGET_BYTES = 16384
CHUNKED = -1

_KEY_LINE = re.compile(rb"\r\n(?i:authorization|x-api-key)[ \t]*:[^\r\n]*")
_CREDENTIAL = re.compile(rb"\r\n(?i:(authorization)|x-api-key)[ \t]*:")
_CONDITIONS = frozenset((VERSION_NAME, MIN_EPOCH_NAME))
_OURS = re.compile(
    rb"\r\n(?i:(%b)|(%b))[ \t]*:[ \t]*([^\r\n]*)"
    % (b"|".join(NOT_FORWARDED), b"|".join(READ_AND_FORWARDED))
)
# Stricter than llhttp, which accepts several spaces, RTSP and fragments (RFC 9112 3).
_REQUEST_LINE = re.compile(rb"[A-Z-]+ ([!-\"$-~]+) HTTP/1\.[01]\r\n")
_REQUEST_LINE_SPARE = 64  # room for method and version in addition to the longest target
_BARE_LF = re.compile(rb"(?<!\r)\n")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?]*)(.*)")
_PORT = rb"(?:[0-9]{0,4}|[0-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(?::" + _PORT + rb")?\Z")
_LENGTH = re.compile(rb"[0-9]{1,18}\Z")
PLAIN_OPTIONS = frozenset((b"keep-alive", b"close", b"upgrade"))


class RequestHead(msgspec.Struct, gc=False):
    """A parsed request head."""

    method: bytes
    target: bytes  # in origin form, as it is forwarded
    lines: bytes  # request line and the client's own fields, each ended by CRLF
    keep_alive: bool
    http_1_0: bool
    length: int  # bytes of body, or CHUNKED
    expects_continue: bool = False
    upgrade: bytes = b""
    host: bytes = b""
    content_type: bytes = b""
    request_id: bytes = b""
    websocket_key: bytes = b""
    idempotency_key: bool = False
    hints: dict[bytes, bytes] = {}
    origin: bytes = b""
    log_words: tuple[str, str, str] = ("", "", "")  # as text: method, target without secrets, path
    template: HeadTemplate | None = None  # its cached template, if it has one


def _bad(message: str, code: str = "malformed_request") -> HttpError:
    return HttpError(400, message, code, close=True)


def skip_empty_lines(buffer: bytes) -> bytes:
    """`buffer` without the empty lines before a request (RFC 9112 2.2)."""
    if buffer[:2] != b"\r\n":
        return buffer
    start = 2
    while buffer.startswith(b"\r\n", start):
        start += 2
    return buffer[start:]


def find_head_end(buffer: bytes | bytearray, searched: int = 0) -> int:
    """The end of the head (past its blank line), 0 while it is incomplete.

    `searched`: how many bytes previous calls have searched. Raises HttpError 414 or 431 if the head
    is too large, and 400 immediately for bytes that can't begin a request (TLS).
    """
    end = buffer.find(b"\r\n\r\n", searched - 3 if searched > 3 else 0)
    if 0 <= end <= MAX_HEAD_BYTES - 4:
        return end + 4
    if buffer[:1] == b"\x16":
        raise _bad("this listener is plain HTTP, and received TLS", "tls_on_plain_port")
    if end < 0 and len(buffer) <= MAX_HEAD_BYTES:
        longest = MAX_TARGET_BYTES + _REQUEST_LINE_SPARE
        if len(buffer) > longest and buffer.find(b"\r\n", 0, longest) < 0:
            raise _too_long()
        if _BARE_LF.search(buffer, max(0, searched - 1)):
            raise _bad("lines must end with CRLF")
        return 0
    raise HttpError(
        431, f"the request head is larger than {MAX_HEAD_BYTES} bytes", "head_too_large", close=True
    )


def _too_long() -> HttpError:
    return HttpError(414, "the request target is too long", "target_too_long", close=True)


def parse_request_head(head: bytes) -> RequestHead:
    """Parse one complete head, with its blank line. Raises HttpError if it must not pass."""
    parser = _parsed(head)
    version, method = parser.get_http_version(), parser.get_method()
    if version not in ("1.1", "1.0"):
        raise HttpError(505, f"HTTP/{version} is not supported", "http_version", close=True)
    if method in (b"CONNECT", b"TRACE"):
        raise HttpError(
            405, f"{method.decode()} is not served", "method_not_allowed", close=True,
            detail="Method Not Allowed",
        )  # fmt: skip
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise _bad("the request line is not METHOD TARGET HTTP/1.1, with one space between each")
    lines, fields = _split(head)
    host = _host(fields, optional=version == "1.0")
    _check_credentials(head)
    target = _origin_form(line[1], method, host)
    nominated = connection_options(fields.get(b"connection", ()))
    if not PLAIN_OPTIONS.issuperset(nominated):
        lines = drop_fields(lines, nominated)
    expected = {value.lower() for value in fields.get(b"expect", ())}
    if expected - {b"100-continue"}:
        raise HttpError(417, "only 100-continue can be expected", "expectation", close=True)
    return RequestHead(
        method=method,
        target=target,
        lines=b"%b %b HTTP/1.1\r\n%b" % (method, target, lines),
        keep_alive=is_persistent(nominated, http_1_0=version == "1.0"),
        http_1_0=version == "1.0",
        length=_length(fields, version),
        host=host,
        expects_continue=bool(expected) and version == "1.1",  # RFC 9110 10.1.1: not of HTTP/1.0
        upgrade=_first(fields, b"upgrade").lower() if b"upgrade" in nominated else b"",
        content_type=_first(fields, b"content-type"),
        request_id=_request_id(fields),
        websocket_key=_first(fields, b"sec-websocket-key"),
        idempotency_key=b"idempotency-key" in fields,
        hints=_hints(fields),
        origin=_first(fields, b"origin"),
        log_words=_words(method, target),
    )


def _words(method: bytes, target: bytes) -> tuple[str, str, str]:
    text = target.decode("latin-1")
    return method.decode("latin-1"), mask_secrets(text), text.partition("?")[0]


def _parsed(head: bytes) -> httptools.HttpRequestParser:
    """The head parsed by llhttp; HTTP/2 and folded lines are refused."""
    if head.startswith(b"PRI * HTTP/2"):
        raise HttpError(505, "HTTP/2 is not supported", "http_version", close=True)
    parser = httptools.HttpRequestParser(None)  # no callbacks: results are read from the parser
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # llhttp leaves an upgrade to its user: `RequestHead.upgrade`
    except httptools.HttpParserError as error:
        raise _bad(f"malformed request head: {error}") from None
    if b"\r\n " in head or b"\r\n\t" in head:
        raise _bad("folded header lines are not accepted")  # RFC 9112 5.2
    return parser


_Fields = dict[bytes, list[bytes]]


def _split(head: bytes) -> tuple[bytes, _Fields]:
    """The client's header lines that are forwarded, and every field that is read."""
    kept: list[bytes] = []
    fields: _Fields = {}
    start = head.index(b"\r\n")  # without the request line, which the caller writes
    for match in _OURS.finditer(head, start):
        ours, passed, value = match.groups()
        fields.setdefault((ours or passed).lower(), []).append(value.rstrip(b" \t"))
        if ours is not None:
            kept.append(head[start : match.start()])
            start = match.end()
    kept.append(head[start:-2])
    return b"".join(kept)[2:], fields


def _hints(fields: _Fields) -> dict[bytes, bytes]:
    """The first value of each hint; a repeated weight version condition is an error."""
    if any(len(fields.get(name, ())) > 1 for name in _CONDITIONS):
        raise _bad("a weight version condition is given twice")
    hints = {HINTS[name]: values[0] for name, values in fields.items() if name in HINTS}
    ranks = fields.get(RANK_NAME)
    if ranks is not None:  # it is also forwarded, because an engine may read it
        hints[RANK_HINT] = ranks[0] if len(set(ranks)) == 1 else b", ".join(ranks)
    if LOAD_FORMAT_NAME in fields:  # likewise
        hints[LOAD_HINT] = fields[LOAD_FORMAT_NAME][0]
    return hints


def hint_lines(hints: Mapping[bytes, bytes]) -> bytes:
    """The header lines of `hints`."""
    hint_values = {name: hints[key] for name, key in HINTS.items() if key in hints}
    return b"".join(b"%b: %b\r\n" % field for field in hint_values.items())


def _first(fields: _Fields, name: bytes) -> bytes:
    values = fields.get(name)
    return values[0] if values else b""


def is_persistent(options: frozenset[bytes], *, http_1_0: bool) -> bool:
    """RFC 9112 9.3. Computed here because llhttp drops the options when a message is complete."""
    return b"close" not in options and (not http_1_0 or b"keep-alive" in options)


def connection_options(connection: Iterable[bytes]) -> frozenset[bytes]:
    """The field names and options in the values of `connection`, in lower case."""
    tokens = (token.strip().lower() for value in connection for token in value.split(b","))
    return frozenset(token for token in tokens if token)


def _length(fields: _Fields, version: str) -> int:
    lengths = fields.get(b"content-length", [])
    codings = fields.get(b"transfer-encoding", [])
    if lengths and codings:
        raise _bad("content-length and transfer-encoding together")  # RFC 9112 6.3: smuggling
    if len(lengths) > 1 or len(codings) > 1:
        raise _bad("the body's length is given twice")
    if lengths:
        if not _LENGTH.match(lengths[0]):
            raise _bad("content-length is not a plain number")
        return int(lengths[0])
    if not codings:
        return 0
    if version == "1.0":
        raise _bad("HTTP/1.0 has no transfer-encoding")
    if codings[0].lower() != b"chunked":
        raise HttpError(501, "transfer-encoding must be chunked", "transfer_encoding", close=True)
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
    return next((fields[name][0] for name in REQUEST_ID_FIELDS if fields.get(name, [b""])[0]), b"")


def _check_credentials(head: bytes) -> None:
    """Refuse a repeated credential: a worker could read another key than the one that the proxy
    has checked (RFC 9110 5.3, 11.6.2)."""
    is_bearer = [bool(name) for name in _CREDENTIAL.findall(head)]
    if len(is_bearer) > len(set(is_bearer)):
        raise _bad("Authorization or X-Api-Key is given twice")


def _origin_form(target: bytes, method: bytes, host: bytes) -> bytes:
    if len(target) > MAX_TARGET_BYTES:
        raise _too_long()
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target
    absolute = _ABSOLUTE.match(target)
    if absolute is None:
        raise _bad("the request target must begin with a slash")
    if absolute[1].lower() != host.lower():
        raise _bad("the target names another host than the Host field")
    path = absolute[2]
    return path if path.startswith(b"/") else b"/" + path


def drop_fields(lines: bytes, names: frozenset[bytes]) -> bytes:
    """Header lines without the fields `names`, in lower case (nominated ones: RFC 9110 7.6.1)."""
    kept = [
        line + b"\r\n"
        for line in lines.split(b"\r\n")[:-1]
        if line.partition(b":")[0].strip().lower() not in names
    ]
    return b"".join(kept)


def drop_field(lines: bytes, name: bytes) -> bytes:
    """As `drop_fields`, for one lower-case name and lines that begin with a request line and have
    no blanks around field names."""
    field = b"\r\n%b:" % name
    start = lines.lower().find(field)
    while start >= 0:
        lines = lines[:start] + lines[lines.index(b"\r\n", start + 2) :]
        start = lines.lower().find(field, start)
    return lines


def set_bearer(lines: bytes, key: bytes) -> bytes:
    """The lines of a head with `key` as their only credential."""
    return b"%bauthorization: Bearer %b\r\n" % (_KEY_LINE.sub(b"", lines), key)
