"""A cache of parsed request heads that differ only in the values of some fields.

The key of a head is its request line, the fields that the proxy reads, and the names of all others.
The second head of a key becomes a template: its varying values are replaced by unique marks, and
the result is parsed, so equal values of two fields are not confused. Later heads are compared with
the template. Invariant: a hit equals what `parse_request_head` returns for the same bytes; a head
that is not plainly well-formed is parsed each time. Entries contain credentials: the cache is
bounded, and its contents are never shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from hashlib import blake2b
from typing import Final

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.forwarded import ForwardedHeaders, reject_loop
from omni_proxy.wire.head_caching.lru import Doorkeeper, LruCache
from omni_proxy.wire.header_fields import READ_FIELDS, REQUEST_ID_FIELDS
from omni_proxy.wire.request import (
    CONTROLS,
    CONTROLS_AND_SPACES,
    COUNT,
    RequestHead,
    parse_request_head,
)
from omni_proxy.wire.scan.head_template import HeadTemplate, Step

CRLF: Final = b"\r\n"
LENGTH_NAME: Final = b"content-length"


def learn_template(
    sample: bytes,
    varying: Collection[int],
    ids: Collection[bytes],
    parse: Callable[[bytes], RequestHead],
) -> tuple[RequestHead, HeadTemplate] | None:
    """The parsed head and the template for heads like `sample`, a complete head.

    `varying`: indexes of the lines whose values vary. `ids`: lower-case names of fields that may
    have the request id. None if the parser does not copy the values unchanged.
    """
    lines = sample[:-4].split(CRLF)
    stem = blake2b(sample, digest_size=16).hexdigest()  # no head contains its own hash
    marks = {
        index: b"%b-%d." % (stem.encode(), index)
        for index in sorted(varying)
        if name_of(lines[index]) != LENGTH_NAME
    }
    marked = [
        _up_to_value(line) + marks[index] if index in marks else line
        for index, line in enumerate(lines)
    ]
    try:
        head = parse(CRLF.join((*marked, b"", b"")))
    except HttpError:
        return None
    after = _text_after_marks(head.lines, marks)
    if head.lines.count(stem.encode()) != len(after) or not _only_in_lines(head, stem):
        return None  # a mark occurs twice, or outside the lines
    id_of = next((index for index, mark in marks.items() if mark == head.request_id), None)
    if id_of not in after and stem.encode() in head.request_id:
        return None
    template = HeadTemplate(
        head.lines.partition(stem.encode())[0],
        *_steps(lines, sorted(varying), after, ids),
        counted=len(marks) < len(varying),
        id_index=2 * list(after).index(id_of) + 1 if id_of in after else -1,
    )
    head.lines = b""
    return head, template


def _steps(
    lines: list[bytes], varying: list[int], after: dict[int, bytes], ids: Collection[bytes]
) -> tuple[tuple[Step, ...], bytes]:
    """`steps` and `last` of a HeadTemplate."""
    steps: list[Step] = []
    done = 0
    for index in varying:
        before = b"".join(line + CRLF for line in lines[done:index])
        beginning = _up_to_value(lines[index])
        name = name_of(beginning)
        forbidden = CONTROLS_AND_SPACES if name in ids else CONTROLS
        if name == LENGTH_NAME:
            forbidden = COUNT
        same = before + beginning
        steps.append((same, len(same), forbidden, after.get(index)))
        done = index + 1
    return tuple(steps), b"".join(line + CRLF for line in lines[done:]) + CRLF


def name_of(field: bytes) -> bytes:
    """The name in a header line, in lower case."""
    return field.partition(b":")[0].lower()


def _up_to_value(field: bytes) -> bytes:
    """The part of a header line before its value."""
    name, _, value = field.partition(b":")
    return name + b": " if value[:1] == b" " else name + b":"


def _only_in_lines(head: RequestHead, stem: str) -> bool:
    """Whether marks occur only in the lines and the request id of the parsed head."""
    others = [
        getattr(head, name)
        for name in RequestHead.__struct_fields__
        if name not in ("lines", "request_id", "template")
    ]
    return stem not in repr(others)


def _text_after_marks(lines: bytes, marks: dict[int, bytes]) -> dict[int, bytes]:
    """For each mark in `lines`, in order: the text from it to the next mark."""
    after_marks: dict[int, bytes] = {}
    rest, last = lines, None
    for index, mark in marks.items():
        before, is_there, after = rest.partition(mark)
        if is_there:
            if last is not None:
                after_marks[last] = before
            after_marks[index] = rest = after
            last = index
    return after_marks


TEMPLATES: Final = 1024
# Larger heads, and heads with more varying values, are parsed: comparing them would cost as much.
TEMPLATE_BYTES: Final = 8192
TEMPLATE_FIELDS: Final = 64
MAX_VARYING: Final = 16

_LENGTH: Final = re.compile(rb"\r\n(?i:content-length): ?([0-9]{1,15})\r\n")
# Fields that the proxy reads, but whose values are not in the key: any non-empty value matches.
_ANY_VALUE: Final = frozenset((LENGTH_NAME, b"idempotency-key", *REQUEST_ID_FIELDS))

Key = tuple[bytes, ...]
Parse = Callable[[bytes], RequestHead]


class RequestHeadCache:
    """`parse_request_head` with a cache. `secure`: the forwarded headers report TLS. `read`:
    further fields, in lower case, whose values are part of the key."""

    def __init__(
        self,
        forwarded: ForwardedHeaders | None = None,
        *,
        secure: bool = False,
        proxy_id: bytes = b"",
        read: frozenset[bytes] = frozenset(),
    ) -> None:
        self._forwarded = forwarded
        self._secure = secure
        self._proxy_id = proxy_id
        self._read = (READ_FIELDS | read) - _ANY_VALUE
        self._ids = frozenset(REQUEST_ID_FIELDS)
        if forwarded is not None:
            self._read |= forwarded.read_fields()
            self._ids |= forwarded.id_fields()
        self._known: LruCache[Key, _Template] = LruCache(TEMPLATES)
        self._seen_once = Doorkeeper(TEMPLATES)
        self._last: _Template | None = None  # tried first: the next head often matches it too

    @property
    def size(self) -> int:
        """The number of cached heads."""
        return len(self._known)

    def parse(self, head: bytes) -> RequestHead:
        """Raises HttpError, as `parse_request_head` does."""
        match = _LENGTH.search(head)
        length = match[1] if match is not None else None
        last = self._last
        known = last.read(head, length) if last is not None else None
        return known if known is not None else self._look_up(head, length)

    def _look_up(self, head: bytes, length: bytes | None) -> RequestHead:
        key = self._key(head)
        template = self._known.get(key) if key else None
        parsed = template.read(head, length) if template is not None else None
        if parsed is None:
            parsed = self._parse(head)
            template = self._learn(key, template, head)
            if template is not None:
                template.build(parsed, length, self._parse, self._ids)
        if template is not None and template.template is not None:
            self._use(template)
        return parsed

    def _learn(self, key: Key, template: _Template | None, head: bytes) -> _Template | None:
        """The template to build or rebuild with this head, None if there is none."""
        if template is not None:
            return template if template.add_varying(head) else None
        if not key or not self._seen_once.admits(key):
            return None
        template = _Template(key, head, self._always_varying(head))
        self._known.put(key, template)
        return template

    def _use(self, template: _Template) -> None:
        last = self._last
        if last is not None and last is not template:
            self._known.get(last.key)  # marks it as recently used
        self._last = template

    def _parse(self, head: bytes) -> RequestHead:
        reject_loop(head, self._proxy_id)  # a cache hit has the hop field of an accepted head
        parsed = parse_request_head(head)
        if self._forwarded is not None:
            self._forwarded.prepare(parsed, secure=self._secure)
        return parsed

    def _key(self, head: bytes) -> Key:
        """Empty for a head that is not cached."""
        if len(head) > TEMPLATE_BYTES:
            return ()
        line, *fields = head[:-4].split(CRLF)
        if len(fields) > TEMPLATE_FIELDS:
            return ()
        key = [line]
        for field in fields:
            name = field.partition(b":")[0]
            key.append(field if name.lower() in self._read else name)
        return tuple(key)

    def _always_varying(self, head: bytes) -> frozenset[int]:
        """Indexes of lines whose values always count as varying, even if two heads agree."""
        names = self._ids | {LENGTH_NAME}
        fields = enumerate(head[:-4].split(CRLF))
        return frozenset(index for index, field in fields if name_of(field) in names)


class _Template:
    """The entry of one key. `template`: None if its heads are parsed each time."""

    __slots__ = ("_head", "_sample", "_varying", "key", "template")

    def __init__(self, key: Key, sample: bytes, varying: frozenset[int]) -> None:
        self.key = key
        self.template: HeadTemplate | None = None
        self._head: RequestHead | None = None
        self._sample = sample
        self._varying = varying  # indexes of lines

    def read(self, head: bytes, length: bytes | None) -> RequestHead | None:
        """None if the head must be parsed. `length`: the content-length of this head."""
        known, template = self._head, self.template
        if known is None or template is None:
            return None
        parts = template.match(head, length)
        if parts is None:
            return None
        return RequestHead(
            known.method,
            known.target,
            b"".join(parts),
            known.keep_alive,
            known.http_1_0,
            int(length) if template.counted and length else known.length,
            known.expects_continue,
            known.upgrade,
            known.host,
            known.content_type,
            parts[template.id_index] if template.id_index > 0 else known.request_id,
            known.websocket_key,
            known.idempotency_key,
            known.hints,
            known.origin,
            known.log_words,
            template,
        )

    def add_varying(self, head: bytes) -> bool:
        """Add the lines that differ in another head of this key; False if none does."""
        both = zip(self._sample.split(CRLF), head.split(CRLF), strict=True)
        differ = {index for index, (one, other) in enumerate(both) if one != other}
        if differ <= self._varying:
            return False
        self._varying |= differ
        self._sample = head
        return True

    def build(
        self,
        parsed: RequestHead,
        length: bytes | None,
        parse_request_head: Parse,
        ids: frozenset[bytes],
    ) -> None:
        """Build the template; it is used only if it returns `parsed` for the sample."""
        self.template = None
        if len(self._varying) > MAX_VARYING:
            return
        made = learn_template(self._sample, self._varying, ids, parse_request_head)
        if made is None:
            return
        self._head, self.template = made
        parsed.template = self.template
        if self.read(self._sample, length) != parsed:
            self.template = parsed.template = None
