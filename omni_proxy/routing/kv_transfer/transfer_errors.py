"""Errors of the transfer of a KV cache: neither engine of the pair is to be blamed for them.

A transfer fails where a network does, or since the other engine is gone; outlier ejection by such
errors would empty both pools. Invariant: only an error counts whose text names the transfer.
"""

from __future__ import annotations

import re
from typing import Final

LOOK_BYTES: Final = 16384  # of an error's text
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
    """Whether this answer is an error of the transfer."""
    return status >= 500 and _MARKS.search(body[:LOOK_BYTES]) is not None


def is_transfer_event(events: bytes) -> bool:
    """Whether the beginning of an event stream is an error of the transfer."""
    look = events[:LOOK_BYTES]
    return _ERROR_EVENT.search(look) is not None and _MARKS.search(look) is not None
