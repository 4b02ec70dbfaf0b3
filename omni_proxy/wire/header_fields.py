"""Names of header fields, in lower case: which end at the proxy, and which it reads or writes.

The only list of each kind: the data plane, the admin API and the configuration read them from here.
"""

from __future__ import annotations

import re
from typing import Final

from omni_proxy.wire.load_report import LOAD_FORMAT_NAME

TOKEN: Final = rb"[A-Za-z0-9!#$%&'*+.^_`|~-]"  # a byte of a name (RFC 9110 5.6.2)
FIELD_NAME: Final = re.compile(TOKEN.decode() + "+")

# Fields about one connection, never forwarded (RFC 9110 7.6.1, RFC 2616 13.5.1).
HOP_BY_HOP: Final = (
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"trailers", b"transfer-encoding", b"upgrade",
)  # fmt: skip

# Routing hints of clients: field name to key in `RequestHead.hints`.
HINT_PREFIX: Final = b"x-sglang-omni-route-"
HINT_PREFIX_TEXT: Final = HINT_PREFIX.decode()  # for messages
VERSION_NAME: Final = b"x-omni-weight-version"  # also in responses
MIN_EPOCH_NAME: Final = b"x-omni-min-weight-epoch"
VERSION_HINT: Final = b"weight-version"
EPOCH_HINT: Final = b"min-weight-epoch"
HINTS: Final = {
    **{HINT_PREFIX + key: key for key in (b"model", b"stream", b"capabilities", b"worker")},
    VERSION_NAME: VERSION_HINT,
    MIN_EPOCH_NAME: EPOCH_HINT,
}
RANK_NAME: Final = b"x-data-parallel-rank"  # a hint that is also forwarded: an engine may read it
RANK_HINT: Final = b"data-parallel-rank"
LOAD_HINT: Final = b"load-format"  # the client requests the engine's load in the response
HINTED_FIELDS: Final = {**HINTS, RANK_NAME: RANK_HINT}

# Fields of requests that are not forwarded, or that the proxy writes itself.
NOT_FORWARDED: Final = (*HOP_BY_HOP, b"host", b"content-length", b"expect", *HINTS)
REQUEST_ID_FIELDS: Final = (b"x-sglang-omni-request-id", b"x-request-id", b"x-correlation-id")
# Fields that are read and forwarded.
READ_AND_FORWARDED: Final = (
    b"content-type", *REQUEST_ID_FIELDS, b"idempotency-key", b"sec-websocket-key", b"origin",
    b"x-omni-hop", RANK_NAME, LOAD_FORMAT_NAME,
)  # fmt: skip
# All other fields are only validated for syntax.
READ_FIELDS: Final = frozenset((*NOT_FORWARDED, *READ_AND_FORWARDED))

# Fields that only the proxy may send to a client (`dataplane.relay.response_relay`,
# `fleet.weight_version`): a worker could claim to be another one, or to have other weights.
DIAGNOSTICS: Final = (
    b"x-sglang-omni-worker", b"x-sglang-omni-request-id", b"x-sglang-omni-route-attempt",
    b"x-omni-attempts", VERSION_NAME, b"x-omni-weight-version-end", b"x-omni-weight-epoch",
    b"x-omni-weight-epoch-end",
)  # fmt: skip


def as_texts(names: tuple[bytes, ...]) -> tuple[str, ...]:
    return tuple(name.decode("ascii") for name in names)
