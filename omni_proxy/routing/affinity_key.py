"""What a client is known by, for policies that keep a client with its worker.

A key that was set for the purpose wins over what happens to be there: the credentials, the address
that a balancer passed on, the cookie. Same head, same key; long values are hashed, so that a key
is short and a credential of any length is safe to keep. Source: routers.md 1.1.
"""

from __future__ import annotations

import hashlib
import re

MAX_KEY_BYTES = 256
# In the order of preference.
NAMES = (b"x-smg-routing-key", b"x-session-id", b"authorization", b"x-forwarded-for", b"cookie")
_LINE = re.compile(rb"(?:^|\n)(" + b"|".join(NAMES) + rb"):[ \t]*([^\r\n]*)", re.IGNORECASE)


def routing_key(lines: bytes) -> str:
    """Of header lines `name: value` with CRLF; "" where nothing tells clients apart."""
    found: dict[bytes, bytes] = {}
    for line in _LINE.finditer(lines):
        value = line[2].rstrip(b" \t")
        if value:
            found.setdefault(line[1].lower(), value)
    for name in NAMES:
        if name in found:
            return _short(found[name])
    return ""


def _short(value: bytes) -> str:
    if len(value) > MAX_KEY_BYTES:
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    return value.decode("latin-1")
