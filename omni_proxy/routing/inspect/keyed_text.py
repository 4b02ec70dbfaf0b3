"""The text of a request by named keys of its body: for configured routes and /v1/responses.

Pure. A key may be dotted (`input.text`). A value may be a text, token ids, a list of either, parts
with a `text`, or messages with a role and content. Invariant: every body gives fields, in time
linear in its length; a key that is missing or nested too deeply gives no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from omni_proxy.routing.inspect.body_fields import ABSENT, BodyFields, is_given, starts_with
from omni_proxy.shared.decoding import MALFORMED

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
