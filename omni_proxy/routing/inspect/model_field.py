"""Finds the model in a request body, and replaces it by another one.

For aliases with `rewrite`. Invariant: only the bytes of the model's value change. A body that names
its model twice is refused, because two parsers may use different ones; a body that names none is
unchanged.
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

Span: TypeAlias = tuple[int, int]  # offsets of the first byte of a value, and of the byte after it
Parts: TypeAlias = "list[bytes | memoryview]"

_BATCH: Final = "speech_batch"  # its items may name the model, too
_MODEL: Final = b'"model"'
_BACKSLASH: Final = b"\\"  # searched first: a single byte is found much faster
_BLANKS: Final = b" \t\r\n"
_BOUNDARIES: Final = re.compile(rb'boundary="?([0-9A-Za-z\'()+_,./:=?-]{1,70})"?', re.IGNORECASE)
_IS_DISPOSITION: Final = re.compile(rb"content-disposition[ \t]*:", re.IGNORECASE)
_DISPOSITION: Final = re.compile(
    rb'content-disposition: *form-data; *name="([^"\\]*)"'
    rb'(?:; *filename="[^"]*")?(?:; *filename\*=[^;" ]+)?\Z',
    re.IGNORECASE,
)
_AMBIGUOUS_LINE_END: Final = re.compile(
    rb"(?<!\r)\n|\r(?!\n)|\r\n[ \t]"
)  # line ends that parsers may dispute
_TO_ELEMENT: Final = re.compile(rb"[ \t\r\n]*+,?[ \t\r\n]*+")


def model_spans(route: Route, body: bytes, facts: HeadFacts, read: str | None = None) -> list[Span]:
    """Spans of the values that name the model, in their order. `read`: the model that inspection
    read from a JSON body, if any. Raises HttpError 400."""
    if read is not None and route.traffic != _BATCH and (span := _only_span(body, read)):
        return [span]
    if has_json_body(route, facts) and body:
        members = find_members(body, object_at(body))
        return sorted((*_named_once(members), *_of_items(route, body, members)))
    if route.body_kind is FORM:
        return _at_most_one(form_values(body, facts.content_type, "model"))
    return []


def _only_span(body: bytes, model: str) -> Span | None:
    """The span of the value without a walk, if the key occurs only once in the text: then it must
    be the one that was read. None if that is not certain."""
    name_start = body.find(_MODEL)
    name_end = name_start + len(_MODEL)
    if (
        name_start < 0
        or body.find(_MODEL, name_end) >= 0
        or (body.find(_BACKSLASH) >= 0 and body.find(ESCAPED_LETTER) >= 0)
    ):
        return None
    value = b'"%b"' % model.encode("utf-8", "surrogatepass")
    start = body.find(value, name_end)
    if start < 0 or body[name_end:start].strip(_BLANKS) != b":":
        return None  # the value has escapes
    return start, start + len(value)


def session_spans(first: str | bytes) -> list[Span]:
    """`model_spans` of the first message of a speech session. The settings are in its object
    `session`, or in the message itself. Raises HttpError 400."""
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
    start, end = _at_most_one((member.value_at, member.end) for member in objects)[0]
    inside = find_members(text[start:end])
    return [
        (start + inner_start, start + inner_end) for inner_start, inner_end in _named_once(inside)
    ]


def walk_model_spans(body: bytes) -> Generator[None, None, list[Span]]:
    """`model_spans` of a JSON body that is too large for one pass. Raises HttpError 400."""
    members = []
    for member in walk_members(body):
        if member is None:
            yield
        else:
            members.append(member)
    return _named_once(members)


def _named_once(members: Iterable[JsonMember]) -> list[Span]:
    return _at_most_one(
        (member.value_at, member.end) for member in members if key_text(member.name) == "model"
    )


def _at_most_one(candidates: Iterable[Span]) -> list[Span]:
    spans = list(candidates)
    if len(spans) > 1:
        message = "the body names its model twice, so it is not clear which one is meant"
        raise HttpError(400, message, "duplicate_key")
    return spans


def check_form(body: bytes, content_type: bytes) -> None:
    """For callers that may use only some models. Raises HttpError 400 if another parser of the form
    could read another model: it is named twice, or a part has an unusual form."""
    boundaries = _BOUNDARIES.findall(content_type)
    delimiter = b"\r\n--" + b"".join(boundaries)
    if len(boundaries) != 1 or not body.startswith(delimiter[2:]):
        raise _unclear()
    models, offset = 0, len(delimiter) - 2
    for _ in range(MAX_PARTS):
        if body[offset : offset + 2] == b"--" and not body[offset + 2 : offset + 64].strip(b"\r\n"):
            break
        head, blank, value = body[offset : offset + MAX_PART_HEAD_BYTES].partition(b"\r\n\r\n")
        name = _name_of_part(head)
        if not blank or name is None or value.startswith(delimiter[2:]):
            raise _unclear()
        models += name == b"model"
        offset = body.find(delimiter, offset + len(head) + len(blank)) + len(delimiter)
        if offset < len(delimiter):
            raise _unclear()
    else:
        raise _unclear()
    if models > 1:
        message = "the body names its model twice, so it is not clear which one is meant"
        raise HttpError(400, message, "duplicate_key")


def _name_of_part(head: bytes) -> bytes | None:
    """In lower case; None for a head that parsers may read differently."""
    first, *lines = head.split(b"\r\n")
    dispositions = [line for line in lines if _IS_DISPOSITION.match(line)]
    match = _DISPOSITION.match(dispositions[0]) if len(dispositions) == 1 else None
    if first or match is None or _AMBIGUOUS_LINE_END.search(head):
        return None
    return match[1].lower()


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
                yield from (
                    (start + inner_start, start + inner_end)
                    for inner_start, inner_end in _named_once(inside)
                )


def _elements(body: bytes, start: int, end: int) -> Iterator[Span]:
    """Spans of the elements, if the value is a list. Raises HttpError 400."""
    elements = read_elements(msgspec.Raw(bytes(body[start:end])))
    offset = _next_element(body, start + 1)
    for element in elements:
        yield offset, offset + len(element)
        offset = _next_element(body, offset + len(element))
    if body.startswith(b"[", start) and offset != end - 1:
        raise invalid_json()  # contains NaN, or is nested too deeply


def _next_element(body: bytes, offset: int) -> int:
    match = _TO_ELEMENT.match(body, offset)
    return match.end() if match is not None else offset


def with_model(body: bytes, spans: Sequence[Span], model: str, *, is_json: bool) -> Parts:
    """The body with these values replaced by `model`, in parts that refer to it."""
    text = json.dumps(model) if is_json else model
    value, view, offset = text.encode(), memoryview(body), 0
    parts: Parts = []
    for start, end in spans:
        parts += view[offset:start], value
        offset = end
    parts.append(view[offset:])
    return parts
