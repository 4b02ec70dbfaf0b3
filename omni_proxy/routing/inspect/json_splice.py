"""Edits of a JSON object in its text: sets, replaces or removes single keys.

A body is never decoded and encoded again: engines must get the client's spelling of all other keys
(numbers, escapes, order, blanks). Invariant: the result decodes to the body's object with only
these changes; all other bytes and their order are unchanged. If a key to be changed occurs twice,
the body is refused, because two parsers may use different ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import msgspec

from omni_proxy.routing.inspect.large_json import (
    PYTHON_SCALAR,
    JsonMember,
    key_text,
    walk_members,
)
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.wire.errors import HttpError, bad_request

# The JSON text of the new value; None to remove the key; a mapping of edits within a nested object,
# which is created if it is absent or null.
Edit: TypeAlias = "bytes | Mapping[str, Edit] | None"
Edits = Mapping[str, Edit]

_BOM: Final = b"\xef\xbb\xbf"  # of UTF-8; Python's reader skips it
ESCAPED_LETTER: Final = b"\\u00"  # start of an escaped ASCII letter: key names are ASCII
_TO_VALUE: Final = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
_TO_KEY: Final = re.compile(rb"[ \t\r\n]*+,?[ \t\r\n]*+")
_decode_members: Callable[[bytes | memoryview], dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
).decode


class JsonText:
    """A JSON text that is read and edited several times, but parsed at most once, and only if it
    may have one of the keys in question. The offsets of its members are computed only if an
    existing member is changed whose name also occurs elsewhere in the text."""

    __slots__ = ("_body", "_escapes", "_is_parsed", "_members", "_start", "_values")

    def __init__(
        self,
        body: bytes,
        members: Sequence[JsonMember] | None = None,
        *,
        is_checked: bool = False,
    ) -> None:
        """`members`: as for `splice_parts`. `is_checked`: the body is known to be a JSON object.

        Raises HttpError 400.
        """
        self._body = body
        self._start = object_at(body)
        # A name may be written with escapes. `find` is faster than `in`, which raises internally.
        self._escapes = body.find(ESCAPED_LETTER) >= 0
        self._members = members
        self._values: dict[str, msgspec.Raw] | None = None
        self._is_parsed = members is not None
        if not (is_checked or self._is_parsed):
            self._parse()

    def _parse(self) -> None:
        self._is_parsed = True
        self._values = _values_of(self._body, self._start)
        if self._values is None:
            self._members = _walked_members(self._body, self._start)

    def value(self, name: str) -> bytes:
        """The text of a key's value, b"" if it is absent; of duplicates, the last one."""
        if not self._is_parsed:
            if not self._escapes and self._body.find(_quoted(name)) < 0:
                return b""
            self._parse()
        if self._values is not None:
            value = self._values.get(name)
            return b"" if value is None else bytes(value)
        for member in reversed(self._members or ()):
            if key_text(member.name) == name:
                return bytes(self._body[member.value_at : member.end])
        return b""

    def splice(self, edits: Edits, text: bytes = b"") -> bytes:
        """The text with `edits`. `text`: the encoded members to insert if the body has none of the
        keys, if known. Raises HttpError 400 if a changed key occurs twice."""
        body, start = self._body, self._start
        if self._lacks(edits) and self._members is None:
            return _with_added(body, start, text or _added(edits, ()))
        if not self._is_parsed:
            self._parse()
        if self._values is not None and self._members is None:
            changed = self._with_values(self._values, edits)
            if changed is not None:
                return changed
        if self._members is None:
            self._members = find_members(body, start)
        return b"".join(_parts(memoryview(body), start, edits, self._members))

    def _lacks(self, edits: Edits) -> bool:
        """Whether the body certainly has none of these keys."""
        if self._escapes:
            return False
        body = self._body
        for name in edits:  # noqa: SIM110  a generator would cost a frame for each
            if body.find(_quoted(name)) >= 0:
                return False
        return True

    def _with_values(self, values: Mapping[str, msgspec.Raw], edits: Edits) -> bytes | None:
        """The text with `edits`, if the name of each existing key to edit occurs only once in the
        text, so that it must be that key. Otherwise None."""
        body, first, places = self._body, self._start + 1, []
        for name in edits.keys() & values.keys():
            quoted, value, edit = _quoted(name), values[name], edits[name]
            place = body.find(quoted)
            is_single = place >= 0 and body.find(quoted, place + 1) < 0
            if self._escapes or not is_single or not isinstance(edit, bytes):
                return None
            if bytes(value) != edit:
                value_at = _match_end(_TO_VALUE, body, place + len(quoted))
                places.append((value_at, value_at + len(value), edit))
        added = _added(edits, values)
        parts = [body[:first], added, b"," if added and values else b""]
        if len(places) > 1:
            places.sort()
        for value_at, end, text in places:
            parts += body[first:value_at], text
            first = end
        parts.append(body[first:])
        return b"".join(parts)


@lru_cache(maxsize=256)
def _quoted(name: str) -> bytes:
    """The name as in a text that escapes no letters."""
    return b'"%b"' % name.encode()


def _with_added(body: bytes, start: int, added: bytes) -> bytes:
    """The body with `added` before all of its members."""
    begin = start + 1
    is_empty = not body.startswith(b'"', begin) and body[begin:].lstrip().startswith(b"}")
    return b"".join((body[:begin], added, b"," if added and not is_empty else b"", body[begin:]))


def _values_of(body: bytes, start: int) -> dict[str, msgspec.Raw] | None:
    """None if the body is not standard JSON."""
    try:
        return _decode_members(memoryview(body)[start:] if start else body)
    except MALFORMED:
        return None


def _added(edits: Edits, there: Container[str]) -> bytes:
    """The text of the members to add: edits of keys that are not in `there`."""
    members = []
    for name, edit in edits.items():
        if edit is None or name in there:
            continue
        text = edit if isinstance(edit, bytes) else splice(b"{}", edit)
        members.append(b"%b:%b" % (_quoted(name), text))
    return b",".join(members)


def splice(body: bytes, edits: Edits) -> bytes:
    """The body with `edits`, in time linear in its length.

    Raises HttpError 400 if the body is not a JSON object in UTF-8, or has a changed key twice.
    """
    return b"".join(splice_parts(body, edits))


def splice_parts(
    body: bytes, edits: Edits, members: Sequence[JsonMember] | None = None
) -> list[bytes | memoryview]:
    """Like `splice`, in parts that refer to the body where unchanged.

    `members`: the members of the body, if they are known already (`walk_members`), as for a body
    that is too large for one pass.
    """
    start = object_at(body)
    if members is None:
        members = find_members(body, start)
    return _parts(memoryview(body), start, edits, members)


def find_members(body: bytes, start: int = 0) -> list[JsonMember]:
    """All members of the object that begins at `start`. Raises HttpError 400."""
    members = _members_by_length(body, start)
    return _walked_members(body, start) if members is None else members


def object_at(body: bytes) -> int:
    """The offset of the object's opening brace. Raises HttpError 400."""
    if body.startswith(b"{") and not body.startswith(b"{\0"):
        return 0
    start = len(_BOM) if body.startswith(_BOM) else 0
    while body[start : start + 1] in (b" ", b"\t", b"\r", b"\n"):
        start += 1
    if body[start : start + 1] != b"{" or body[start + 1 : start + 2] == b"\0":
        if json.detect_encoding(body) in ("utf-8", "utf-8-sig"):
            raise HttpError(400, "JSON request body must be an object", "invalid_json")
        message = "the JSON body of this request must be in UTF-8, since a key of it is changed"
        raise HttpError(400, message, "invalid_json")
    return start


def _members_by_length(body: bytes, start: int) -> list[JsonMember] | None:
    """The members, if all names differ and the body is standard JSON; else None. Much faster than a
    walk, because msgspec finds the lengths of the values."""
    values = _values_of(body, start)
    if values is None:
        return None
    members, offset = [], _match_end(_TO_KEY, body, start + 1)
    for name, value in values.items():
        key_at = offset
        spelled = b'"%b"' % name.encode("utf-8", "surrogatepass")
        if not body.startswith(spelled, offset):
            return None  # the name has escapes, or an earlier name occurs twice
        value_at = _match_end(_TO_VALUE, body, offset + len(spelled))
        end = value_at + len(value)
        members.append(JsonMember(spelled[1:-1], key_at, value_at, end))
        offset = _match_end(_TO_KEY, body, end)
    return members if body[offset : offset + 1] == b"}" else None


def _match_end(pattern: re.Pattern[bytes], body: bytes, offset: int) -> int:
    match = pattern.match(body, offset)
    return match.end() if match is not None else offset


def _walked_members(body: bytes, start: int) -> list[JsonMember]:
    walk: Generator[JsonMember | None, None, None] = walk_members(body, start, PYTHON_SCALAR)
    return [member for member in walk if member is not None]


def _parts(
    body: memoryview, start: int, edits: Edits, members: Sequence[JsonMember]
) -> list[bytes | memoryview]:
    places = _edited(edits, members)
    added = _added(edits, places)
    removed = {places[name] for name, edit in edits.items() if edit is None and name in places}
    parts: list[bytes | memoryview] = [body[: start + 1], added]
    if added and len(members) > len(removed):
        parts.append(b",")
    first_kept = next((n for n in range(len(members)) if n not in removed), len(members))
    offset = start + 1
    for place, name in sorted((place, name) for name, place in places.items()):
        edit, member = edits[name], members[place]
        if edit is None:
            begin, end = _span_to_remove(members, place, first_kept)
            parts.append(body[offset:begin])
            offset = end
        else:
            parts.append(body[offset : member.value_at])
            parts += _replaced(body[member.value_at : member.end], name, edit)
            offset = member.end
    parts.append(body[offset:])
    return parts


def _span_to_remove(members: Sequence[JsonMember], place: int, first_kept: int) -> tuple[int, int]:
    """Includes one comma: the one before the member, or after it if no earlier member is kept."""
    member = members[place]
    if place > first_kept:
        return members[place - 1].end, member.end
    return member.key_at, members[place + 1].key_at if place + 1 < len(members) else member.end


def _edited(edits: Edits, members: Sequence[JsonMember]) -> dict[str, int]:
    """Indices of the members with keys of `edits`. Raises HttpError 400 for a duplicate key."""
    places: dict[str, int] = {}
    for place, member in enumerate(members):
        name = key_text(member.name)
        if name not in edits:
            continue
        if name in places:
            raise _given_twice(name)
        places[name] = place
    return places


def _given_twice(name: str) -> HttpError:
    message = f"the key {name!r} is in the body twice, so it is not clear what is meant"
    return HttpError(400, message, "duplicate_key")


def _replaced(value: memoryview, name: str, edit: bytes | Edits) -> list[bytes | memoryview]:
    if isinstance(edit, bytes):
        return [edit]
    nested = bytes(value)
    if nested == b"null":
        return [splice(b"{}", edit)]
    if not nested.startswith(b"{"):
        raise bad_request(f"{name} must be an object")
    return splice_parts(nested, edit)
