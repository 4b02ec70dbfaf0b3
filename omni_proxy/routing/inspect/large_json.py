"""The routing fields of JSON bodies that are too large to be decoded (note:omni-router 7).

Above `LARGE_BYTES` only the fields at the top level are read; nested values are skipped by their
brackets and strings, without validation. A body of up to `ONE_PASS_BYTES` is read in one pass, a
larger one by `walk_large_json`. Invariant: time is linear in the body's length, memory is constant,
and between two `yield`s of the walk at most about `SLICE_BYTES` are scanned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from itertools import accumulate
from typing import Final

import msgspec

from omni_proxy.routing.inspect.body_fields import invalid_json
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.wire.errors import HttpError

LARGE_BYTES = 1024 * 1024
ONE_PASS_BYTES = 8 * 1024 * 1024  # one pass over more would block the event loop
PREFIX_BYTES = 64 * 1024
_UNSET = msgspec.Raw()


class LargeJsonFields(msgspec.Struct):
    """The routing fields, undecoded, which is sufficient for a prefix."""

    model: msgspec.Raw = _UNSET
    stream: msgspec.Raw = _UNSET
    stream_format: msgspec.Raw = _UNSET
    request_id: msgspec.Raw = _UNSET
    messages: msgspec.Raw = _UNSET
    prompt: msgspec.Raw = _UNSET
    text: msgspec.Raw = _UNSET
    input_ids: msgspec.Raw = _UNSET
    token_ids: msgspec.Raw = _UNSET
    system: msgspec.Raw = _UNSET
    rid: msgspec.Raw = _UNSET
    lora_path: msgspec.Raw = _UNSET
    routed_dp_rank: msgspec.Raw = _UNSET
    data_parallel_rank: msgspec.Raw = _UNSET

    @property
    def beginning(self) -> bytes:
        """The first bytes of the first text that is present."""
        for raw in (
            self.system, self.messages, self.prompt, self.text, self.input_ids, self.token_ids
        ):  # fmt: skip
            if len(raw):
                return bytes(memoryview(raw)[:PREFIX_BYTES])
        return b""


_decode = msgspec.json.Decoder(LargeJsonFields).decode


def read_large_json(body: bytes) -> LargeJsonFields:
    """Raises HttpError 400 if the body is not a JSON object in UTF-8."""
    try:
        return _decode(body)
    except MALFORMED:
        raise HttpError(400, "invalid JSON body", "invalid_json") from None


# The walk in slices. Nested values are skipped by their brackets and strings.

SLICE_BYTES: Final = 256 * 1024
FIRST_BYTES: Final = 512  # first slice of a nested value: most of them are short
KEYS_PER_SLICE: Final = 500
MAX_KEYS: Final = 10_000
MAX_SCALAR_BYTES: Final = 4096
MAX_KEY_BYTES: Final = 256  # enough for every key of interest, even with each character escaped
_BLANKS: Final = re.compile(rb"[ \t\r\n]*+")
STANDARD_SCALAR: Final = re.compile(
    rb"(?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null)(?=[\s,}]|\Z)"
)
_IN_STRING: Final = re.compile(
    rb'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+'
)
_ESCAPE_BYTES: Final = len(rb"\u0000")
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_WHOLE_STRINGS: Final = re.compile(rb'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_STRING_OR_BRACKET: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEP: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_QUOTE, _COMMA, _COLON, _OPEN, _CLOSE = b'",:{}'
_NESTS: Final = b"[{"
_FIELDS: Final = frozenset(LargeJsonFields.__struct_fields__)

# Includes the constants that Python's JSON reader accepts in addition.
PYTHON_SCALAR: Final = re.compile(STANDARD_SCALAR.pattern + rb"|(?:NaN|-?Infinity)(?=[\s,}]|\Z)")

Walk = Generator[None, None, int]


class JsonMember(msgspec.Struct, frozen=True, gc=False):
    """A member of the top-level object, as offsets in the body: of its key's opening quote, of its
    value, and of its end. `name`: the key without quotes, with escapes not decoded."""

    name: bytes
    key_at: int
    value_at: int
    end: int


def key_text(spelled: bytes) -> str:
    """The key of a member, with the escapes in its `name` decoded."""
    text = spelled.decode("utf-8", "replace")
    if "\\" not in text:
        return text
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:  # cut at MAX_KEY_BYTES: not a key of interest
        return text


def walk_large_json(body: bytes) -> Generator[None, None, LargeJsonFields]:
    """Raises HttpError 400 if the body is not a JSON object."""
    values: dict[str, msgspec.Raw] = {}
    for member in walk_members(body):
        if member is None:
            yield
        elif (name := key_text(member.name)) in _FIELDS:
            end = min(member.end, member.value_at + PREFIX_BYTES)
            values[name] = msgspec.Raw(bytes(body[member.value_at : end]))
    return LargeJsonFields(**values)


def walk_members(
    body: bytes, start: int = 0, scalar: re.Pattern[bytes] = STANDARD_SCALAR
) -> Generator[JsonMember | None, None, None]:
    """Yields the top-level members in their order, and None between two slices. `start`: offset of
    the object.

    Raises HttpError 400 unless a JSON object extends from `start` to the end of the body.
    """
    keys, offset = 0, (yield from _blanks(body, start))
    offset = yield from _blanks(body, _skip_char(body, offset, _OPEN))
    more = _byte(body, offset) != _CLOSE
    while more:
        if _byte(body, offset) != _QUOTE:
            raise invalid_json()
        key_at = offset
        offset = yield from _string(body, offset)
        name = bytes(body[key_at + 1 : min(offset - 1, key_at + MAX_KEY_BYTES)])
        offset = yield from _blanks(body, offset)
        offset = yield from _blanks(body, _skip_char(body, offset, _COLON))
        value_at = offset
        offset = yield from _value(body, offset, scalar)
        yield JsonMember(name, key_at, value_at, offset)
        offset = yield from _blanks(body, offset)
        more = _byte(body, offset) == _COMMA
        if more:
            offset = yield from _blanks(body, offset + 1)
        keys += 1
        if keys > MAX_KEYS:
            message = f"a large JSON request body may have at most {MAX_KEYS} fields"
            raise HttpError(400, message, "invalid_json")
        if not keys % KEYS_PER_SLICE:
            yield None
    offset = yield from _blanks(body, _skip_char(body, offset, _CLOSE))
    if offset != len(body):
        raise invalid_json()


def _byte(body: bytes, offset: int) -> int:
    if offset >= len(body):
        raise invalid_json()
    return body[offset]


def _skip_char(body: bytes, offset: int, char: int) -> int:
    if _byte(body, offset) != char:
        raise invalid_json()
    return offset + 1


def _match_end(pattern: re.Pattern[bytes], body: bytes, offset: int) -> int:
    match = pattern.match(body, offset, offset + SLICE_BYTES)
    return match.end() if match is not None else offset


def _blanks(body: bytes, offset: int) -> Walk:
    while (end := _match_end(_BLANKS, body, offset)) - offset == SLICE_BYTES:
        offset = end
        yield
    return end


def _value(body: bytes, offset: int, scalar: re.Pattern[bytes]) -> Walk:
    first = _byte(body, offset)
    if first == _QUOTE:
        return (yield from _string(body, offset))
    if first in _NESTS:
        return (yield from _nested(body, offset))
    match = scalar.match(body, offset, offset + MAX_SCALAR_BYTES)
    if match is None:
        raise invalid_json()
    return match.end()


def _string(body: bytes, offset: int) -> Walk:
    """Returns the offset after the string whose opening quote is at `offset`."""
    offset += 1
    while True:
        end = _match_end(_IN_STRING, body, offset)
        if _byte(body, end) == _QUOTE:
            return end + 1
        if end - offset < SLICE_BYTES - _ESCAPE_BYTES:  # invalid, not the end of the slice
            raise invalid_json()
        offset = end
        yield


def _nested(body: bytes, offset: int) -> Walk:
    """Returns the offset after the list or object that begins at `offset`."""
    depth, size, walked = 0, FIRST_BYTES, 0
    while offset < len(body):
        cut = min(len(body), offset + size)
        match = _WHOLE_STRINGS.match(body, offset, cut)
        assert match is not None
        end = match.end()  # before `cut` if a string continues after the slice
        after = _depth_after(body[offset:end], depth)
        if after is None and size > FIRST_BYTES:
            size //= 2
            continue
        if after is None:
            return offset + _length_of(body[offset:end], depth)
        depth, walked = after, walked + end - offset
        offset = end
        if end < cut:
            offset = yield from _string(body, end)
        else:
            size = min(size * 2, SLICE_BYTES)
        if walked >= SLICE_BYTES:
            walked = 0
            yield
    raise invalid_json()


def _depth_after(block: bytes, depth: int) -> int | None:
    """The depth after `block`, which has whole strings only; None if the outermost bracket closes
    in it."""
    brackets = _STRING.sub(b"", block).translate(None, _NO_BRACKETS)
    if depth:  # matching pairs don't change the depth after the block
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    closing = brackets.count(b"]") + brackets.count(b"}")
    if closing >= depth and brackets:
        lowest = min(accumulate(map(_STEP.__getitem__, brackets)))
        if depth + lowest <= 0:
            return None
    return depth + len(brackets) - 2 * closing


def _length_of(block: bytes, depth: int) -> int:
    """The length up to and including the bracket that closes the outermost one."""
    for match in _STRING_OR_BRACKET.finditer(block):
        depth += _STEP.get(match[0][0], 0)
        if not depth:
            return match.end()
    raise AssertionError("the brackets were counted")
