"""The bodies of both legs of a plain chat, made without parsing the body again.

Most bodies have none of the keys that a protocol changes, or have them in the simplest form. That
is determined from the fields that were read to route the request, and from the text. Invariant: the
results are those of the edits of `sglang`, `nixl` and `mooncake`, or None if that is not certain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Final

import msgspec

from omni_proxy.routing.inspect.body_fields import ABSENT, BodyFields, decode_body
from omni_proxy.routing.inspect.json_splice import ESCAPED_LETTER
from omni_proxy.routing.kv_connectors.sglang import (
    MAX_DRAWN,
    RID_CHARS,
    ROOM_BITS,
    ROOM_MASK,
    bootstrap_host,
    json_text,
    port_text,
)
from omni_proxy.routing.policies.policy import RandomBelow
from omni_proxy.shared.decoding import MALFORMED

_FIRST: Final = b'{"'  # no blank, byte-order mark or other encoding, and at least one member
_ONE: Final = b"1"
_BACKSLASH: Final = b"\\"  # searched first: a single byte is found much faster
_PREFILL_RANK: Final = b'"disagg_prefill_dp_rank"'
_MAX_TOKENS: Final = b'"max_tokens"'
_OPTIONAL_LIMIT: Final = b'"max_completion_tokens"'
_STREAM: Final = b'"stream"'


class ChatFields(BodyFields, gc=False):
    """`BodyFields` plus the keys that vLLM's protocols change."""

    max_tokens: msgspec.Raw = ABSENT
    max_completion_tokens: msgspec.Raw = ABSENT
    min_tokens: msgspec.Raw = ABSENT
    min_completion_tokens: msgspec.Raw = ABSENT
    stream_options: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT


_decode: Callable[[bytes], ChatFields] = msgspec.json.Decoder(ChatFields).decode
# Keys that are removed or replaced: bodies with any of them are left to the edits.
_removed = attrgetter("min_tokens", "min_completion_tokens", "stream_options", "kv_transfer_params")
_NONE_REMOVED: Final = (ABSENT,) * 4
# All of these keys except `max_tokens`: most bodies have none of them.
_beside_limit = attrgetter(
    "stream", "max_completion_tokens", "min_tokens", "min_completion_tokens", "stream_options",
    "kv_transfer_params",
)  # fmt: skip
_NONE_BESIDE: Final = (None, *(ABSENT,) * 5)
_PARAMS: Final = b'{"kv_transfer_params":'
_NO_STREAM: Final = b',"stream":false,'
_NO_STREAM_ONE_TOKEN: Final = b',"stream":false,"max_tokens":1,'


def decode_chat(body: bytes) -> BodyFields:
    """Like `decode_body`; the fields are `ChatFields` if the body is strict JSON.

    Raises HttpError 400.
    """
    try:
        fields = _decode(body)
        if not body.isascii():  # the decoder does not validate skipped values
            body.decode()
    except MALFORMED:
        return decode_body(body)
    return fields


def sglang_chat(
    body: bytes,
    prefill_url: str,
    port: int | None,
    random_below: RandomBelow,
    prefill_rank: int | None = None,
) -> tuple[str, bytes, bytes] | None:
    """`rid`, and the bodies of both legs. `body`: valid JSON; `port`: as for `sglang_legs`;
    `prefill_rank`: added to decode's body if the prefill worker has ranks."""
    if (
        not body.startswith(_FIRST)
        or (body.find(_BACKSLASH) >= 0 and body.find(ESCAPED_LETTER) >= 0)
        or body.find(b'"n"') >= 0
        or body.find(b'"rid"') >= 0
        or body.find(b'"bootstrap_') >= 0
    ):
        return None
    number = random_below(MAX_DRAWN)
    rid = f"{number >> ROOM_BITS:0{RID_CHARS}x}"
    beginning, rest = _beginning(prefill_url, port), body[1:]
    keys = f'{number & ROOM_MASK},"rid":"{rid}",'.encode()
    both = b"".join((beginning, keys, rest))
    if prefill_rank is None:
        return rid, both, both
    if body.find(_PREFILL_RANK) >= 0:
        return None
    rank_field = b"%b:%d," % (_PREFILL_RANK, prefill_rank)
    return rid, both, b"".join((beginning, keys, rank_field, rest))


@lru_cache(maxsize=4096)
def _beginning(prefill_url: str, port: int | None) -> bytes:
    """The start of a body of `sglang_chat`, up to the room."""
    host, shown_port = json_text(bootstrap_host(prefill_url)), port_text(port)
    return b'{"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":' % (host, shown_port)


def one_token_chat(body: bytes, fields: BodyFields | None, params: bytes) -> bytes | None:
    """The body of vLLM's prefill leg, or None. `fields`: of this body."""
    if (
        type(fields) is not ChatFields
        or not body.startswith(_FIRST)
        or (body.find(_BACKSLASH) >= 0 and body.find(ESCAPED_LETTER) >= 0)
    ):
        return None
    if _beside_limit(fields) != _NONE_BESIDE:
        return _one_token_of(body, fields, params)
    if body.find(_STREAM) >= 0:
        return None  # null, or a key within another value
    limit = fields.max_tokens
    if not limit:
        return b"".join((_PARAMS, params, _NO_STREAM_ONE_TOKEN, body[1:]))
    key_start = body.find(_MAX_TOKENS)
    end = key_start + len(_MAX_TOKENS)
    if key_start < 0 or body.find(_MAX_TOKENS, end) >= 0:
        return None
    value = bytes(limit)
    value_start = body.find(value, end)  # see `_value_at`
    return b"".join(
        (_PARAMS, params, _NO_STREAM, body[1:value_start], _ONE, body[value_start + len(value) :])
    )


def _one_token_of(body: bytes, fields: ChatFields, params: bytes) -> bytes | None:
    """Like `one_token_chat`, for bodies that have more keys to change than `max_tokens`."""
    if _removed(fields) != _NONE_REMOVED:
        return None
    added, places = b"", list[tuple[int, int, bytes]]()
    if fields.stream is None:
        if body.find(_STREAM) >= 0:
            return None  # null, or a key within another value
        added = b'"stream":false,'
    elif fields.stream:
        places.append((_value_at(body, _STREAM, b"true"), 4, b"false"))
    elif _value_at(body, _STREAM, b"false") < 0:
        return None
    if not fields.max_tokens:
        added += b'"max_tokens":1,'
    else:
        value = bytes(fields.max_tokens)
        places.append((_value_at(body, _MAX_TOKENS, value), len(value), _ONE))
    if fields.max_completion_tokens:
        value = bytes(fields.max_completion_tokens)
        places.append((_value_at(body, _OPTIONAL_LIMIT, value), len(value), _ONE))
    return _replaced(body, [_PARAMS, params, b",", added], places)


def _replaced(
    body: bytes, parts: list[bytes], places: list[tuple[int, int, bytes]]
) -> bytes | None:
    """`body` with its opening brace replaced by `parts`, and new values at `places`: (offset,
    length, value). None if an offset is negative."""
    if len(places) > 1:
        places.sort()
    start = 1
    for offset, size, text in places:
        if offset < 0:
            return None
        parts += body[start:offset], text
        start = offset + size
    parts.append(body[start:])
    return b"".join(parts)


def _value_at(body: bytes, quoted: bytes, value: bytes) -> int:
    """Offset of the value of a top-level key, if its name occurs only once in the text; else -1."""
    key_start = body.find(quoted)
    end = key_start + len(quoted)
    if key_start < 0 or body.find(quoted, end) >= 0:
        return -1
    return body.find(value, end)  # only a colon and blanks are before it


def chat_with_params(body: bytes, params: bytes | None) -> bytes:
    """The body of vLLM's decode leg, if `one_token_chat` made that of the prefill leg."""
    return body if params is None else b'{"kv_transfer_params":%b,%b' % (params, body[1:])
