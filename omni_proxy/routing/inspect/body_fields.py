"""The fields of a request body that routing reads, as raw JSON values or form fields.

Invariant: `BodyFields` refers to the bytes that it was read from and stores almost nothing else; a
value is decoded when it is used. Reading a body takes time linear in its length. Accepts what
Python's JSON reader accepts (NaN, UTF-16), as workers do. The named keys of configured routes and
of /v1/responses are read instead of fixed fields; then every body gives fields, and a key that is
missing or nested too deeply gives none. Source: note:omni-router 7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.wire.errors import HttpError

ABSENT: Final = msgspec.Raw()
NULL: Final = msgspec.Raw(b"null")
MAX_REQUEST_ID_CHARS: Final = 256  # a longer one is not used
MAX_RIDS = 10_000
# Constants that Python's reader accepts in addition to JSON, and valid JSON that replaces them. An
# array is valid only where these are: not after a backslash or next to characters of a number.
_CONSTANTS: Final = (
    (b"-Infinity", b"[100000000000003]"),
    (b"Infinity", b"[100000000000002]"),
    (b"NaN", b"[100000000000001]"),
)
_ARRAYS: Final = frozenset(array for _, array in _CONSTANTS)
_MAX_ARRAY: Final = max(map(len, _ARRAYS))
# Up to the next lone surrogate, which msgspec accepts as bytes but not as an escape. The text
# before it is part of the match, because it shows whether the backslash is itself escaped.
_LONE: Final = re.compile(
    rb"((?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F][0-9a-fA-F]{2})"
    rb"|\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+)"
    rb"(?:\\u([dD][89a-fA-F][0-9a-fA-F]{2}))?"
)
CONSTANT_GROWTH: Final = 6  # the largest factor by which the replacements are longer

if TYPE_CHECKING:
    OptionalRaw: TypeAlias = msgspec.Raw | None
else:
    OptionalRaw = msgspec.Raw  # of the union, msgspec would accept only null


class RoutedFields(msgspec.Struct, gc=False):
    """The fields by which every request is routed; others are skipped. Raw fields of length 0 are
    absent.

    Fields with the default None are compared for every request, and None is compared fastest.
    """

    # The decoder compares a key first with the field after the last one that it found.
    model: str | None = None
    messages: msgspec.Raw = ABSENT
    stream: bool | None = None
    request_id: str | None = None
    rid: OptionalRaw = None
    modalities: OptionalRaw = None
    output_modalities: OptionalRaw = None
    audio: OptionalRaw = None
    image: OptionalRaw = None
    images: OptionalRaw = None
    audios: OptionalRaw = None
    audio_inputs: OptionalRaw = None
    video: OptionalRaw = None
    videos: OptionalRaw = None


class BodyFields(RoutedFields, gc=False):
    """All fields that are read: also those of a prompt and of speech."""

    stream_format: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    input_ids: msgspec.Raw = ABSENT
    token_ids: msgspec.Raw = ABSENT
    system: msgspec.Raw = ABSENT
    ref_audio: msgspec.Raw = ABSENT
    references: msgspec.Raw = ABSENT
    voice: msgspec.Raw = ABSENT
    speaker: msgspec.Raw = ABSENT
    items: msgspec.Raw = ABSENT
    # With one of these an engine caches the same tokens separately.
    lora_path: msgspec.Raw = ABSENT
    cache_salt: msgspec.Raw = ABSENT
    extra_key: msgspec.Raw = ABSENT
    # Fields that change how an engine renders a chat.
    tools: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    add_generation_prompt: msgspec.Raw = ABSENT
    continue_final_message: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT


class NonStandardBodyFields(BodyFields, gc=False):
    """Fields of a body with NaN or infinities: in raw fields these are replaced (`_CONSTANTS`)."""


_FIELDS: Final = BodyFields.__struct_fields__
_TYPED: Final = ("model", "stream", "request_id")
# `BodyFields` with all fields undecoded: accepts any value for any field.
RawBodyFields = msgspec.defstruct(
    "Pieces", [(name, msgspec.Raw, ABSENT) for name in _FIELDS], gc=False
)
# Strict JSON only. It does not validate the text of skipped values, which `decode_body` does.
decode_routed: Callable[[bytes], RoutedFields] = msgspec.json.Decoder(RoutedFields).decode
decode_strict: Callable[[bytes], BodyFields] = msgspec.json.Decoder(BodyFields).decode
_decode_pieces: Callable[[bytes], Any] = msgspec.json.Decoder(RawBodyFields).decode
_decode_adapter: Callable[[bytes], Any] = msgspec.json.Decoder(
    msgspec.defstruct("AdapterField", [("lora_path", msgspec.Raw, ABSENT)], gc=False)
).decode
_decode_any: Callable[[msgspec.Raw | bytes], Any] = msgspec.json.Decoder().decode
_skip: Callable[[bytes], msgspec.Raw] = msgspec.json.Decoder(msgspec.Raw).decode
_decode_list: Callable[[msgspec.Raw], list[msgspec.Raw]] = msgspec.json.Decoder(
    list[msgspec.Raw]
).decode


def decode_body(body: bytes) -> BodyFields:
    """Raises HttpError 400."""
    try:
        payload = decode_strict(body)
    except MALFORMED:
        return _decode_non_standard(body)
    if not body.isascii():  # the decoder does not validate skipped values
        try:
            body.decode()
        except UnicodeDecodeError:
            as_utf8(body)
    return payload


def _decode_non_standard(body: bytes) -> BodyFields:
    """For a body that is not strict JSON, or has a field of an unusual type."""
    text = as_utf8(body)
    if b"\\ud" in text or b"\\uD" in text:
        text = _LONE.sub(_as_bytes, text)
    plain = text
    for constant, array in _CONSTANTS:
        plain = plain.replace(constant, array)
    try:
        texts = _decode_pieces(plain)
    except MALFORMED:
        raise _no_object(plain) from None
    spelled = {name: getattr(texts, name) for name in _FIELDS if name not in _TYPED}
    kind = BodyFields if plain is text else NonStandardBodyFields
    return kind(
        model=read_text(texts.model), stream=_flag_in(texts.stream),
        request_id=read_text(texts.request_id), **spelled,
    )  # fmt: skip


def _no_object(body: bytes) -> HttpError:
    try:
        _skip(body)
    except MALFORMED:
        return invalid_json()
    return HttpError(400, "JSON request body must be an object", "invalid_json")


def invalid_json() -> HttpError:
    return HttpError(400, "invalid JSON body", "invalid_json")


def body_fields_of(fields: dict[str, Any]) -> BodyFields:
    """`BodyFields` of an object that was decoded already."""
    values = {name: fields[name] for name in _FIELDS if name in fields}
    return decode_body(json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def as_utf8(body: bytes) -> bytes:
    """A JSON text, converted to UTF-8. Lone surrogates are kept, as by Python's reader.

    Raises HttpError 400.
    """
    try:
        encoding = json.detect_encoding(body)
        text: str = body.decode(encoding, "surrogatepass")
    except UnicodeDecodeError:
        raise invalid_json() from None
    return body if encoding == "utf-8" else text.encode("utf-8", "surrogatepass")


def _as_bytes(escape: re.Match[bytes]) -> bytes:
    if escape[2] is None:
        return escape[1]
    return escape[1] + chr(int(escape[2], 16)).encode("utf-8", "surrogatepass")


def restore_constants(text: bytes) -> bytes:
    """A raw value of `NonStandardBodyFields`, as the client sent it."""
    for constant, array in _CONSTANTS:
        text = text.replace(array, constant)
    return text


def read_value(raw: msgspec.Raw) -> Any:
    """None if the value can't be decoded, for example because it is nested too deeply."""
    try:
        return _decode_any(raw)
    except MALFORMED:
        pass
    try:  # lone surrogates
        return json.loads(bytes(raw).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None


def read_text(raw: msgspec.Raw) -> str | None:
    """None if the value is not a string."""
    if not starts_with(raw, b'"'):
        return None
    value = read_value(msgspec.Raw(restore_constants(bytes(raw))))
    return value if isinstance(value, str) else None


def _flag_in(raw: msgspec.Raw) -> bool:
    return raw == _TRUE


_TRUE: Final = msgspec.Raw(b"true")
_FALSE: Final = msgspec.Raw(b"false")


def starts_with(raw: msgspec.Raw, prefix: bytes) -> bool:
    return len(raw) > 0 and memoryview(raw)[0] == prefix[0]


def is_given(raw: msgspec.Raw) -> bool:
    """Whether the field is present and not null."""
    return len(raw) > 0 and raw != NULL


def is_truthy(raw: msgspec.Raw | None) -> bool:
    """Whether the field is present and not null, false or empty; any number is true, even 0."""
    if raw is None or not is_given(raw) or raw == _FALSE:
        return False
    if starts_with(raw, b'"'):
        return len(raw) > len('""')
    if starts_with(raw, b"[") or starts_with(raw, b"{"):
        return bool(bytes(memoryview(raw)[1:-1]).strip())
    return True


def is_list(raw: msgspec.Raw) -> bool:
    return starts_with(raw, b"[") and bytes(memoryview(raw)[:_MAX_ARRAY]) not in _ARRAYS


def read_elements(raw: msgspec.Raw | None) -> list[msgspec.Raw]:
    """The elements of a list; [] for any other value."""
    try:
        return _decode_list(raw) if raw is not None and is_list(raw) else []
    except MALFORMED:
        return []


Fields = TypeVar("Fields", bound=msgspec.Struct)


class ObjectListReader(Generic[Fields]):
    """Reads the objects in a list as structs of `kind`, whose fields are all Raw, and skips other
    elements. `least`: objects of fewer bytes can't have any of the fields."""

    def __init__(self, kind: type[Fields], least: int) -> None:
        self._all: Callable[[msgspec.Raw], list[Fields]] = msgspec.json.Decoder(
            list.__class_getitem__(kind)
        ).decode
        self._one: Callable[[msgspec.Raw], Fields] = msgspec.json.Decoder(kind).decode
        self._none = kind()
        self._least = least

    def __call__(self, raw: msgspec.Raw) -> Iterator[Fields]:
        if not starts_with(raw, b"["):
            return
        try:
            match = self._all(raw)
        except MALFORMED:
            for element in read_elements(raw):
                if not starts_with(element, b"{"):
                    continue
                if len(element) < self._least:
                    yield self._none
                    continue
                with suppress(*MALFORMED):  # nested too deeply
                    yield self._one(element)
        else:
            yield from match


def adapters_of_body(body: bytes) -> frozenset[str]:
    """The adapters in the body's `lora_path` (SGLang), even if the key is written with escapes."""
    try:
        return read_adapters(_decode_adapter(body).lora_path)
    except MALFORMED:
        return frozenset()


def read_adapters(raw: msgspec.Raw) -> frozenset[str]:
    """The adapters in the value of `lora_path`: a name, or a list of names for a batch."""
    values = read_elements(raw) if is_list(raw) else [raw]
    return frozenset(filter(None, map(read_text, values)))


def read_rids(raw: msgspec.Raw) -> tuple[str, ...]:
    """The ids in the value of `rid`: one, or a list for a batch."""
    values = read_elements(raw)[:MAX_RIDS] if starts_with(raw, b"[") else [raw]
    texts = (read_text(value) for value in values)
    return tuple(
        text for text in texts
        if text and len(text) <= MAX_REQUEST_ID_CHARS and text.isprintable()
    )  # fmt: skip


# Named keys, which may be dotted (`input.text`). A value may be a text, token ids, a list of
# either, parts with a `text`, or messages with a role and content.

_decode_object: Callable[[msgspec.Raw], dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
).decode
KeyedValue = tuple[str, msgspec.Raw]
# With one of these keys an engine caches the same tokens separately.
CACHED_APART: Final = ("lora_path", "cache_salt", "extra_key")


class KeyedBodyFields(BodyFields, gc=False):
    """A body whose text is the values of some keys, in this order."""

    keyed: tuple[KeyedValue, ...] = ()


def keyed_fields(body: bytes, keys: Sequence[str]) -> KeyedBodyFields:
    """The fields refer to `body`; they are empty if it is not a JSON object in UTF-8."""
    values = dict(_values(body, (*dict.fromkeys(keys), *CACHED_APART)))
    keyed = tuple((key, values[key]) for key in dict.fromkeys(keys) if key in values)
    lora_path, cache_salt, extra_key = (values.get(name, ABSENT) for name in CACHED_APART)
    return KeyedBodyFields(
        keyed=keyed, lora_path=lora_path, cache_salt=cache_salt, extra_key=extra_key
    )


def keyed_value(body: bytes, key: str) -> msgspec.Raw:
    """The value of one key, empty if it is missing."""
    return next((value for _, value in _values(body, (key,))), ABSENT)


def _values(body: bytes, keys: tuple[str, ...]) -> Iterator[KeyedValue]:
    try:
        top = _top_reader(keys)(body)
    except MALFORMED:
        return
    for key in keys:
        name, *below = key.split(".")
        value = _below(top[name], below)
        if is_given(value):
            yield key, value


def _below(value: msgspec.Raw, names: Sequence[str]) -> msgspec.Raw:
    for name in names:
        if not starts_with(value, b"{"):
            return ABSENT
        try:
            value = _decode_object(value).get(name, ABSENT)
        except MALFORMED:
            return ABSENT
    return value


@lru_cache(maxsize=256)
def _top_reader(keys: tuple[str, ...]) -> Callable[[bytes], dict[str, msgspec.Raw]]:
    """A reader for the top-level values of the (dotted) keys; all others are skipped."""
    names = sorted({key.partition(".")[0] for key in keys})
    by_field = {f"value_{number}": name for number, name in enumerate(names)}
    fields = [(field, msgspec.Raw, ABSENT) for field in by_field]
    decode = msgspec.json.Decoder(
        msgspec.defstruct("KeyedValues", fields, rename=by_field, gc=False)
    ).decode

    def read(body: bytes) -> dict[str, msgspec.Raw]:
        decoded = decode(body)
        return {name: getattr(decoded, field) for field, name in by_field.items()}

    return read


# Multipart forms: the fields `model` and `stream`, found by a bounded scan. A malformed form gives
# no fields and no error: the worker validates it.

MAX_VALUE_BYTES = 4096
MAX_PART_HEAD_BYTES = 8192
MAX_PARTS = 2000  # servers commonly refuse more; scanning millions would take seconds
WANTED = ("model", "stream")
_BOUNDARY = re.compile(rb'boundary="?([^";,\r\n]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="?([^";\r\n]+)"?', re.IGNORECASE)


def form_fields(body: bytes, content_type: bytes) -> dict[str, str]:
    """The fields of `WANTED` that are present; the first one of each name."""
    fields: dict[str, str] = {}
    for name, start, end in _form_values(body, content_type):
        if name in WANTED and name not in fields and end - start <= MAX_VALUE_BYTES:
            fields[name] = body[start:end].decode("utf-8", "replace")
            if len(fields) == len(WANTED):
                break
    return fields


def form_values(body: bytes, content_type: bytes, name: str) -> Iterator[tuple[int, int]]:
    """Start and end offsets of the values of all fields with this name."""
    for field, start, end in _form_values(body, content_type):
        if field == name:
            yield start, end


def _form_values(body: bytes, content_type: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of each part; the name of a file part is ""."""
    if not content_type.lower().startswith(b"multipart/form-data"):
        return
    match = _BOUNDARY.search(content_type)
    if not match:
        return
    prefix = b"--" + match[1].strip()
    offset = body.find(prefix)
    for _ in range(MAX_PARTS):
        start = offset + len(prefix)
        if offset < 0 or body[start : start + 2] != b"\r\n":
            return
        offset = body.find(b"\r\n" + prefix, start)
        head_end = body.find(b"\r\n\r\n", start, start + MAX_PART_HEAD_BYTES)
        if offset < 0 or head_end < 0:
            return
        yield _plain_name(body[start:head_end]), head_end + 4, offset
        offset += 2


def _plain_name(head: bytes) -> str:
    """The name of a part, or "" for a file."""
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-disposition:") and b"filename" not in line.lower():
            match = _NAME.search(line)
            if match:
                return match[1].decode("utf-8", "replace")
    return ""
