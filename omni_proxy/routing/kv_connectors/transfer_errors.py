"""Errors of KV transfers, which must not count as failures of either engine of the pair.

A transfer fails because of the network, or because the other engine is down; outlier ejection by
such errors would empty both pools. Invariant: an error counts only if its text names the transfer.
"""

from __future__ import annotations

import re
from typing import Final

LOOK_BYTES: Final = 16384  # searched in an error's text
# SGLang: `KVTransferError` (disaggregation/base), "Failed to get bootstrap", "bootstrap room", the
# session errors of its Mooncake and NIXL backends. vLLM: the classes and log lines of its NIXL and
# Mooncake connectors, "handshake", "KV load failure" (kv_load_failure_policy).
MARKS: Final = (
    "KVTransferError", "kv transfer", "kv_transfer", "KV load", "KVPoll", "bootstrap", "handshake",
    "nixl", "mooncake", "remote_block_ids", "prefill instance", "decode instance",
)  # fmt: skip
_MARKS: Final = re.compile(b"|".join(re.escape(mark.encode()) for mark in MARKS), re.IGNORECASE)
_ERROR_EVENT: Final = re.compile(
    rb'^data: ?\{.{0,400}?"error" *+: *+(?!null)', re.MULTILINE | re.DOTALL
)


def names_transfer(status: int, body: bytes) -> bool:
    """Whether this response is an error of the KV transfer."""
    return status >= 500 and _MARKS.search(body[:LOOK_BYTES]) is not None


def is_transfer_event(events: bytes) -> bool:
    """Whether the first bytes of an event stream are an error of the KV transfer."""
    look = events[:LOOK_BYTES]
    return _ERROR_EVENT.search(look) is not None and _MARKS.search(look) is not None
