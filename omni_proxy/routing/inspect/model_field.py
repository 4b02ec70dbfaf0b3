"""Where a request body names its model, and the body with another model in that place.

For aliases with `rewrite`. Invariant: only the bytes of the model's value change. A body that names
its model twice is refused, since two readers could take another one of them; a body that names none
stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from omni_proxy.routing.inspect.body_fields import (
    MAX_PART_HEAD_BYTES,
    MAX_PARTS,
    form_values,
    invalid_json,
    read_elements,
)
from omni_proxy.routing.inspect.json_splice import ESCAPED_LETTER, find_members, object_at
from omni_proxy.routing.inspect.large_json import JsonMember, key_text, walk_members
from omni_proxy.routing.inspect.requirements import HeadFacts, has_json_body
from omni_proxy.routing.routes import FORM, Route
from omni_proxy.wire.errors import HttpError

Span: TypeAlias = tuple[int, int]  # the first byte of a value, and the first behind it
Parts: TypeAlias = "list[bytes | memoryview]"

_BATCH: Final = "speech_batch"  # its items may name the model, too
_MODEL: Final = b'"model"'
_BACKSLASH: Final = b"\\"  # one byte is found in a tenth of the time
_BLANKS: Final = b" \t\r\n"
_BOUNDARIES: Final = re.compile(rb'boundary="?([0-9A-Za-z\'()+_,./:=?-]{1,70})"?', re.IGNORECASE)
_IS_DISPOSITION: Final = re.compile(rb"content-disposition[ \t]*:", re.IGNORECASE)
_DISPOSITION: Final = re.compile(
    rb'content-disposition: *form-data; *name="([^"\\]*)"'
    rb'(?:; *filename="[^"]*")?(?:; *filename\*=[^;" ]+)?\Z',
    re.IGNORECASE,
)
_ODD: Final = re.compile(rb"(?<!\r)\n|\r(?!\n)|\r\n[ \t]")  # lines that readers end differently
_TO_ELEMENT: Final = re.compile(rb"[ \t\r\n]*+,?[ \t\r\n]*+")


def model_spans(route: Route, body: bytes, facts: HeadFacts, read: str | None = None) -> list[Span]:
    """The values that name the model, in their order. `read`: what a key of a JSON body was read to
    name, if it was. Raises HttpError 400."""
    if read is not None and route.traffic != _BATCH and (span := _only_span(body, read)):
        return [span]
    if has_json_body(route, facts) and body:
        members = find_members(body, object_at(body))
        return sorted((*_named_once(members), *_of_items(route, body, members)))
    if route.body_kind is FORM:
        return _only(form_values(body, facts.content_type, "model"))
    return []


def _only_span(body: bytes, model: str) -> Span | None:
    """The place of the value without a walk, where the key is in the text once: it is the one that
    was read, then. None where that is not certain."""
    at = body.find(_MODEL)
    name_end = at + len(_MODEL)
    if (
        at < 0
        or body.find(_MODEL, name_end) >= 0
        or (body.find(_BACKSLASH) >= 0 and body.find(ESCAPED_LETTER) >= 0)
    ):
        return None
    value = b'"%b"' % model.encode("utf-8", "surrogatepass")
    start = body.find(value, name_end)
    if start < 0 or body[name_end:start].strip(_BLANKS) != b":":
        return None  # it is written with escapes
    return start, start + len(value)


def session_spans(first: str | bytes) -> list[Span]:
    """The same of the first message of a speech session, whose object `session`, if it has one,
    has the settings; of a message without settings: none. Raises HttpError 400."""
    if not isinstance(first, str):
        return []
    text = first.encode()
    members = find_members(text, object_at(text))
    objects = [
        member
        for member in members
        if key_text(member.name) == "session" and text.startswith(b"{", member.value_at)
    ]
    if not objects:
        return _named_once(members)
    start, end = _only((member.value_at, member.end) for member in objects)[0]
    inside = find_members(text[start:end])
    return [(start + at, start + to) for at, to in _named_once(inside)]


def walk_model_spans(body: bytes) -> Generator[None, None, list[Span]]:
    """The same for a JSON body that is too large to be read at once. Raises HttpError 400."""
    members = []
    for member in walk_members(body):
        if member is None:
            yield
        else:
            members.append(member)
    return _named_once(members)


def _named_once(members: Iterable[JsonMember]) -> list[Span]:
    return _only(
        (member.value_at, member.end) for member in members if key_text(member.name) == "model"
    )


def _only(found: Iterable[Span]) -> list[Span]:
    spans = list(found)
    if len(spans) > 1:
        message = "the body names its model twice, so it is not clear which one is meant"
        raise HttpError(400, message, "duplicate_key")
    return spans


def check_form(body: bytes, content_type: bytes) -> None:
    """For a caller that may use some models only. Raises HttpError 400 where another reader of the
    form could see another model: it is named twice, or a part is not written as clients do."""
    boundaries = _BOUNDARIES.findall(content_type)
    delimiter = b"\r\n--" + b"".join(boundaries)
    if len(boundaries) != 1 or not body.startswith(delimiter[2:]):
        raise _unclear()
    models, at = 0, len(delimiter) - 2
    for _ in range(MAX_PARTS):
        if body[at : at + 2] == b"--" and not body[at + 2 : at + 64].strip(b"\r\n"):
            break
        head, blank, value = body[at : at + MAX_PART_HEAD_BYTES].partition(b"\r\n\r\n")
        name = _name_of_part(head)
        if not blank or name is None or value.startswith(delimiter[2:]):
            raise _unclear()
        models += name == b"model"
        at = body.find(delimiter, at + len(head) + len(blank)) + len(delimiter)
        if at < len(delimiter):
            raise _unclear()
    else:
        raise _unclear()
    if models > 1:
        message = "the body names its model twice, so it is not clear which one is meant"
        raise HttpError(400, message, "duplicate_key")


def _name_of_part(head: bytes) -> bytes | None:
    """In lower case; None for a head that two readers may take differently."""
    first, *lines = head.split(b"\r\n")
    named = [line for line in lines if _IS_DISPOSITION.match(line)]
    found = _DISPOSITION.match(named[0]) if len(named) == 1 else None
    if first or found is None or _ODD.search(head):
        return None
    return found[1].lower()


def _unclear() -> HttpError:
    message = "with an API key that has models, a form must be plain multipart/form-data"
    return HttpError(400, message, "malformed_body")


def _of_items(route: Route, body: bytes, members: Iterable[JsonMember]) -> Iterator[Span]:
    if route.traffic != _BATCH:
        return
    for member in members:
        if key_text(member.name) != "items":
            continue
        for start, end in _elements(body, member.value_at, member.end):
            if body.startswith(b"{", start):
                inside = find_members(bytes(body[start:end]))
                yield from ((start + at, start + to) for at, to in _named_once(inside))


def _elements(body: bytes, start: int, end: int) -> Iterator[Span]:
    """Of the list there; none of anything else. Raises HttpError 400."""
    elements = read_elements(msgspec.Raw(bytes(body[start:end])))
    at = _next(body, start + 1)
    for element in elements:
        yield at, at + len(element)
        at = _next(body, at + len(element))
    if body.startswith(b"[", start) and at != end - 1:
        raise invalid_json()  # NaN, or nested too deeply


def _next(body: bytes, at: int) -> int:
    found = _TO_ELEMENT.match(body, at)
    return found.end() if found is not None else at


def with_model(body: bytes, spans: Sequence[Span], model: str, *, is_json: bool) -> Parts:
    """The body with `model` in the place of these values, in parts that refer to it."""
    text = json.dumps(model) if is_json else model
    value, view, at = text.encode(), memoryview(body), 0
    parts: Parts = []
    for start, end in spans:
        parts += view[at:start], value
        at = end
    parts.append(view[at:])
    return parts
