"""JSON bodies too large to be decoded: what stands on top of them, and what may be assumed then.

Contract (omni-router.md 7): past `LARGE_BYTES` only the routing fields are read, the rest is walked
over undecoded; what the body would have told must come in hints wherever the workers differ in it.
Invariant: the time is that of one walk over the bytes, the memory does not grow with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from omni_proxy.fleet.registry import Fleet
from omni_proxy.wire.errors import HttpError

if TYPE_CHECKING:
    from omni_proxy.routing.inspect.requirements import Requirements

LARGE_BYTES = 1024 * 1024
AT_ONCE_BYTES = 8 * 1024 * 1024  # a walk over more would keep everybody else waiting
PREFIX_BYTES = 64 * 1024
_UNSAID = msgspec.Raw()


class Top(msgspec.Struct):
    """The fields that are read; texts stay as they are spelled, which does for a prefix."""

    model: msgspec.Raw = _UNSAID
    stream: msgspec.Raw = _UNSAID
    stream_format: msgspec.Raw = _UNSAID
    request_id: msgspec.Raw = _UNSAID
    messages: msgspec.Raw = _UNSAID
    prompt: msgspec.Raw = _UNSAID
    text: msgspec.Raw = _UNSAID
    input_ids: msgspec.Raw = _UNSAID

    @property
    def beginning(self) -> bytes:
        """Of the first text that is there."""
        for raw in (self.messages, self.prompt, self.text, self.input_ids):
            if len(raw):
                return bytes(memoryview(raw)[:PREFIX_BYTES])
        return b""


_decode = msgspec.json.Decoder(Top).decode


def read_top(body: bytes) -> Top:
    """Raises HttpError 400 for what is no JSON object; other spellings than UTF-8 are none here."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise HttpError(400, "invalid JSON body", "invalid_json") from None


def settle(fleet: Fleet, need: Requirements) -> None:
    """What was not read must make no difference, or be hinted. Raises HttpError 400."""
    hinted = need.hinted
    candidates = fleet.candidates(None, need.mask)
    batch = need.large == "speech_batch"  # its items may name other models than it does
    mixed = len({worker.model for worker in candidates}) > 1
    if mixed and b"model" not in hinted and (batch or need.model is None):
        kind = "large speech batch requests" if batch else "large JSON requests"
        raise HttpError(
            400,
            f"{kind} across mixed-model workers require x-sglang-omni-route-model",
            "model_hint_required",
        )
    if b"capabilities" in hinted or not candidates:
        return
    widest = max((worker.mask for worker in candidates), key=int.bit_count)
    if any(worker.mask & ~widest for worker in candidates):
        raise HttpError(
            400,
            "large JSON requests across mixed-capability workers require "
            "x-sglang-omni-route-capabilities",
            "capabilities_hint_required",
        )
    if any(worker.mask != widest for worker in candidates):
        need.mask |= widest
