"""vLLM's NIXL protocol: prefill first, then decode with an object from prefill's response.

The prefill engine computes the prompt and one token; its response has `kv_transfer_params` with
the location of its KV blocks. Invariants: that object is copied as it is, none of its keys is
interpreted here; decode gets the client's limits and `stream`; a client's own `kv_transfer_params`
never reach an engine. Source: note:features 2.2, 2.7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from omni_proxy.routing.inspect.body_fields import ABSENT
from omni_proxy.routing.inspect.json_splice import Edits, JsonText
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.wire.errors import HttpError

PARAMS: Final = "kv_transfer_params"
REMOTE_DECODE: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


class _Answer(msgspec.Struct, gc=False):
    kv_transfer_params: msgspec.Raw = ABSENT


_decode_answer: Callable[[bytes], _Answer] = msgspec.json.Decoder(_Answer).decode
_OPTIONAL_LIMIT: Final = "max_completion_tokens"


def prefill_edits(path: str, body: JsonText, params: bytes = REMOTE_DECODE) -> Edits:
    """Edits for the prefill engine: no stream, one token. Raises HttpError 400 for a duplicate
    key."""
    edits: dict[str, bytes | Edits | None] = {
        PARAMS: params, "stream": b"false", "stream_options": None,
    }  # fmt: skip
    if path == "/inference/v1/generate":
        return edits | {"sampling_params": {"max_tokens": b"1", "min_tokens": None}}
    if path == "/v1/responses":
        return edits | {"max_output_tokens": b"1"}
    edits |= {"max_tokens": b"1", "min_tokens": None, "min_completion_tokens": None}
    if body.value(_OPTIONAL_LIMIT):
        edits[_OPTIONAL_LIMIT] = b"1"
    return edits


def decode_edits(params: bytes | None) -> Edits:
    """Edits for the decode engine. None: there was no prefill leg, or its response has no object;
    the decode engine then computes the prompt itself."""
    return {PARAMS: params}


def read_params(answer: bytes) -> bytes | None:
    """The `kv_transfer_params` in a prefill engine's complete response, or None."""
    try:
        value = bytes(_decode_answer(answer).kv_transfer_params)
    except MALFORMED:
        try:
            value = JsonText(answer.strip()).value(PARAMS)
        except HttpError:
            return None
    return value if value.startswith(b"{") and value.strip() != b"{}" else None
