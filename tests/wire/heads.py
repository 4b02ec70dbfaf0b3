"""Request heads for tests: a function that builds them, and hostile heads with their status."""

import pytest

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import (
    MAX_TARGET_BYTES,
    parse_request_head,
)

LINE = b"GET / HTTP/1.1\r\n"
HOST = b"host: x\r\n"


def request(*fields, line=LINE, host=HOST):
    return line + host + b"".join(field + b"\r\n" for field in fields) + b"\r\n"


def refusal(raw):
    with pytest.raises(HttpError) as caught:
        parse_request_head(raw)
    return caught.value


HOSTILE = {
    "both lengths": (request(b"content-length: 5", b"transfer-encoding: chunked"), 400),
    "both, the other way": (request(b"transfer-encoding: chunked", b"content-length: 5"), 400),
    "two lengths": (request(b"content-length: 5", b"content-length: 6"), 400),
    "the same length twice": (request(b"content-length: 5", b"content-length: 5"), 400),
    "a list of lengths": (request(b"content-length: 5, 5"), 400),
    "a signed length": (request(b"content-length: +5"), 400),
    "a hexadecimal length": (request(b"content-length: 0x5"), 400),
    "an empty length": (request(b"content-length: "), 400),
    "a length past 64 bits": (request(b"content-length: 99999999999999999999"), 400),
    "a length past 18 digits": (request(b"content-length: 1000000000000000000"), 400),
    "two codings": (request(b"transfer-encoding: chunked", b"transfer-encoding: chunked"), 400),
    "a coding list": (request(b"transfer-encoding: gzip, chunked"), 501),
    "chunked twice in a list": (request(b"transfer-encoding: chunked, chunked"), 400),
    "chunked and a comma": (request(b"transfer-encoding: chunked,"), 400),
    "a comma and chunked": (request(b"transfer-encoding: , chunked"), 501),
    "chunked with a parameter": (request(b"transfer-encoding: chunked;a=b"), 400),
    "chunked in quotes": (request(b'transfer-encoding: "chunked"'), 400),
    "chunked and a vertical tab": (request(b"transfer-encoding: \x0bchunked"), 400),
    "chunked and a NUL": (request(b"transfer-encoding: chunked\x00"), 400),
    "a coding after chunked": (request(b"transfer-encoding: chunked, identity"), 400),
    "an empty coding": (request(b"transfer-encoding:"), 400),
    "a length and an empty coding": (
        request(b"content-length: 5", b"transfer-encoding:"), 400,
    ),
    "a space before the coding's colon": (request(b"transfer-encoding : chunked"), 400),
    "an unknown coding": (request(b"transfer-encoding: xchunked"), 400),
    "chunked in 1.0": (request(b"transfer-encoding: chunked", line=b"GET / HTTP/1.0\r\n"), 400),
    "two hosts": (request(b"host: y"), 400),
    "the same host twice": (request(b"Host: x"), 400),
    "no host": (request(host=b""), 400),
    "a host with a path": (request(host=b"host: x/y\r\n"), 400),
    "a host with a user": (request(host=b"host: a@x\r\n"), 400),
    "a host with two ports": (request(host=b"host: x:1:2\r\n"), 400),
    "a host with a port of letters": (request(host=b"host: x:a\r\n"), 400),
    "a host with a port past 65535": (request(host=b"host: x:65536\r\n"), 400),
    "a host with the greatest port of five digits": (request(host=b"host: x:99999\r\n"), 400),
    "a host with a port of six digits": (request(host=b"host: x:000080\r\n"), 400),
    "a host with a bracket only": (request(host=b"host: [::1\r\n"), 400),
    "a host with a control byte": (request(host=b"host: x\x01\r\n"), 400),
    "a host with high bytes": (request(host=b"host: \xc3\xa4\r\n"), 400),
    "a host with a scheme": (request(host=b"host: http://x\r\n"), 400),
    "a target with another port": (request(line=b"GET http://x:81/ HTTP/1.1\r\n"), 400),
    "a host with spaces": (request(host=b"host: x y\r\n"), 400),
    "a folded line": (request(b"a: b", b" c"), 400),
    "a line folded by a tab": (request(b"a: b", b"\tc"), 400),
    "a fold in the first line": (request(host=b" host: x\r\n"), 400),
    "a bare LF in a value": (request(b"a: b\nc: d"), 400),
    "a bare CR in a value": (request(b"a: b\rc: d"), 400),
    "a bare LF after the request line": (b"GET / HTTP/1.1\nhost: x\r\n\r\n", 400),
    "a NUL in a value": (request(b"a: b\x00"), 400),
    "a control byte in a value": (request(b"a: \x01"), 400),
    "a DEL in a value": (request(b"a: \x7f"), 400),
    "a NUL in the target": (request(line=b"GET /\x00 HTTP/1.1\r\n"), 400),
    "a high byte in the target": (request(line=b"GET /\xff HTTP/1.1\r\n"), 400),
    "a space before the colon": (request(b"a : b"), 400),
    "a space in a name": (request(b"a b: c"), 400),
    "a high byte in a name": (request(b"\xe4: b"), 400),
    "an empty name": (request(b": b"), 400),
    "a field without a colon": (request(b"a"), 400),
    "a relative target": (request(line=b"GET x HTTP/1.1\r\n"), 400),
    "a target that is a query": (request(line=b"GET ?x HTTP/1.1\r\n"), 400),
    "a fragment": (request(line=b"GET /a#b HTTP/1.1\r\n"), 400),
    "another host in the target": (request(line=b"GET http://y/ HTTP/1.1\r\n"), 400),
    "a user in the target": (request(line=b"GET http://a@x/ HTTP/1.1\r\n"), 400),
    "a strange scheme": (request(line=b"GET ftp://x/ HTTP/1.1\r\n"), 400),
    "the asterisk for GET": (request(line=b"GET * HTTP/1.1\r\n"), 400),
    "two spaces": (request(line=b"GET  / HTTP/1.1\r\n"), 400),
    "a space at the end": (request(line=b"GET / HTTP/1.1 \r\n"), 400),
    "a tab as space": (request(line=b"GET\t/ HTTP/1.1\r\n"), 400),
    "a lower-case method": (request(line=b"get / HTTP/1.1\r\n"), 400),
    "an unknown method": (request(line=b"FETCH / HTTP/1.1\r\n"), 400),
    "another protocol": (request(line=b"GET / RTSP/1.0\r\n"), 400),
    "CONNECT": (request(line=b"CONNECT x:80 HTTP/1.1\r\n"), 405),
    "TRACE": (request(line=b"TRACE / HTTP/1.1\r\n"), 405),
    "HTTP/0.9": (b"GET /\r\nhost: x\r\n\r\n", 505),
    "HTTP/2.0 in a line": (request(line=b"GET / HTTP/2.0\r\n"), 505),
    "HTTP/1.2": (request(line=b"GET / HTTP/1.2\r\n"), 400),
    "an HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\n", 505),
    "another expectation": (request(b"expect: wonders"), 417),
    "a second expectation": (request(b"expect: 100-continue", b"expect: wonders"), 417),
    "a target too long": (request(line=b"GET /%b HTTP/1.1\r\n" % (b"a" * MAX_TARGET_BYTES)), 414),
}  # fmt: skip
