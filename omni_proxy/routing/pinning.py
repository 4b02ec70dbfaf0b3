"""Pins a request to a data-parallel rank, to the owner of a voice, or to that of a response. Pure.

Invariants: the engine gets the rank that the client chose, or the request is refused; without ranks
in the fleet the header and keys are left to the engines. A speech request with its own reference
audio, or with the voice `default`, is pinned to no voice; a body that was not read completely is
pinned to the voice owner. The id of a response is recorded, with its worker, before it is sent to
the client, and its bytes are unchanged; a request for a response of an unknown worker goes to any
worker. Source: note:features 4 and 8, note:omni-router 13.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol
from urllib.parse import unquote

import msgspec

from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.body_fields import (
    ABSENT,
    BodyFields,
    ObjectListReader,
    as_utf8,
    is_list,
    is_truthy,
    keyed_value,
    read_text,
    read_value,
    starts_with,
)
from omni_proxy.routing.inspect.json_splice import find_members, splice_parts
from omni_proxy.routing.inspect.large_json import JsonMember, key_text
from omni_proxy.routing.inspect.requirements import (
    ANY_RANK,
    AUDIO,
    Requirements,
    has_voice_reference,
)
from omni_proxy.routing.policies.session_load import OwnSessions
from omni_proxy.routing.routes import NAMED, UNPINNED, VOICE_OWNER
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.header_fields import RANK_HINT

BODY_KEY: Final = "routed_dp_rank"
OLD_BODY_KEY: Final = "data_parallel_rank"  # of earlier SGLang versions
# A body that has neither of these has neither key: a part of both keys, and the start of an escaped
# ASCII letter.
_COMMON_PART: Final = b"_rank"
_ESCAPE: Final = b"\\u00"
_BACKSLASH: Final = b"\\"  # searched first: a single byte is found much faster
_NUL: Final = b"\0"
_WIDE_MARKS: Final = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE  # UTF-32: the same, or a NUL first
# SGLang ignores the header on these routes.
BODY_ONLY_PATHS: Final = frozenset(("/generate",))
_KEYS: Final = (BODY_KEY, OLD_BODY_KEY)
_MAX_RANK: Final = 1 << 31
_MAX_DIGITS: Final = len(str(_MAX_RANK))
# Stands for the members of a large body, for `splice_parts`: the body is an object and not empty.
_SOME_MEMBER: Final = (JsonMember(b"", 0, 0, 0),)


def may_name_rank(body: bytes) -> bool:
    """Whether the body may contain one of the keys; fast."""
    # `find` instead of `in`, which is slower: it raises and clears an error internally.
    return (
        body.find(_COMMON_PART) >= 0
        or (body.find(_BACKSLASH) >= 0 and body.find(_ESCAPE) >= 0)
        or body.find(_NUL, 0, 2) >= 0  # inlined: _is_of_other_encoding
        or body.startswith(_WIDE_MARKS)
    )


def _is_of_other_encoding(body: bytes) -> bool:
    """Whether the JSON text is in UTF-16 or UTF-32, by its first bytes (RFC 4627, 3)."""
    return body.find(_NUL, 0, 2) >= 0 or body.startswith(_WIDE_MARKS)


def pin_to_rank(need: Requirements, hints: Mapping[bytes, bytes], body: bytes) -> None:
    """Set `dp_rank` and `names_rank_in_body` from the header (`hints`) and the body.

    Raises HttpError 400 for an invalid rank, for two different ranks, and for a duplicate key.
    """
    chosen = {
        where: _rank(where, value)
        for where, value in _chosen(need, hints, body)
        if value != b"null"
    }
    if len(set(chosen.values())) > 1:
        names = " and ".join(f"{where} {rank}" for where, rank in chosen.items())
        raise _bad_rank(f"the request names two data-parallel ranks: {names}")
    need.dp_rank = next(iter(chosen.values()), ANY_RANK)
    need.names_rank_in_body = not chosen.keys().isdisjoint((BODY_KEY, OLD_BODY_KEY))


def _chosen(
    need: Requirements, hints: Mapping[bytes, bytes], body: bytes
) -> Iterable[tuple[str, bytes]]:
    if RANK_HINT in hints:
        yield "the header X-data-parallel-rank", hints[RANK_HINT]
    if need.large_body_class:
        yield from need.ranks_in_large_body
    elif need.body_fields is not None and may_name_rank(body):
        yield from _in_body(as_utf8(body) if _is_of_other_encoding(body) else body)


def _in_body(body: bytes) -> Iterable[tuple[str, bytes]]:
    seen: set[str] = set()
    for member in find_members(body, _start(body)):
        name = key_text(member.name)
        if name in _KEYS:
            if name in seen:
                message = f"the key {name!r} is in the body twice"
                raise HttpError(400, message, "duplicate_key")
            seen.add(name)
            yield name, body[member.value_at : member.end]


def _start(body: bytes) -> int:
    return max(0, body.find(b"{"))


def _rank(where: str, value: bytes) -> int:
    """Raises HttpError 400."""
    text = value.strip()
    rank = int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else _MAX_RANK
    if rank >= _MAX_RANK:
        shown = text[:40].decode("latin-1")
        raise _bad_rank(f"{where}: {shown!r} is not a data-parallel rank; use a number, 0 or more")
    return rank


def _bad_rank(message: str) -> HttpError:
    return HttpError(400, message, "invalid_rank")


def candidates_of_rank(candidates: Sequence[Worker], index: int) -> list[Worker]:
    """The candidates with this rank; a worker without ranks counts as rank 0."""
    return [
        target
        for target in candidates
        if (target.index == index if isinstance(target, DpRank) else not index)
    ]


def rank_error(candidates: Sequence[Worker], workers: Sequence[Worker], index: int) -> HttpError:
    """The 400 for a rank that can't take the request. `candidates`: targets of any rank that could;
    `workers`: all workers of the fleet."""
    free = ", ".join(target.display_id for target in candidates)
    ranks = max((len(worker.dp_ranks) for worker in workers), default=0)
    problem = "is full or out of rotation" if index < max(1, ranks) else "does not exist"
    return _bad_rank(
        f"data-parallel rank {index} {problem}; ranks that can take this request: {free}"
    )


def body_for_rank(
    path: str, need: Requirements, rank: DpRank, body: bytes
) -> list[bytes | memoryview]:
    """The body for this rank, in parts: with an added key on routes whose engine ignores the
    header, unless the client's body has one. Raises HttpError 400 if the body is not an object."""
    if path not in BODY_ONLY_PATHS or need.names_rank_in_body or need.body_fields is None:
        return [body]
    members = None
    if need.large_body_class and not need.ranks_in_large_body:
        members = _SOME_MEMBER  # the body was scanned: an object, not empty, with neither key
    return splice_parts(body, {BODY_KEY: b"%d" % rank.index}, members)


SPEECH_TRAFFIC = frozenset(("speech_http", "speech_batch", "tts_websocket"))


class _Item(msgspec.Struct, gc=False):
    """One item of a batch."""

    voice: msgspec.Raw = ABSENT
    speaker: msgspec.Raw = ABSENT
    ref_audio: msgspec.Raw = ABSENT
    references: msgspec.Raw = ABSENT


_items_in = ObjectListReader(_Item, least=len('{"voice":"v"}'))


def pin_to_voice_owner(registry: VoiceRegistry, traffic: str, requirements: Requirements) -> None:
    """Pin the request to the voice owner if it uses a voice that is stored there."""
    if not registry.owner or traffic not in SPEECH_TRAFFIC:
        return
    payload = requirements.body_fields
    # A WebSocket session without a valid first message is not pinned: any worker refuses it.
    unread = (payload is None or bool(requirements.large_body_class)) and traffic != "tts_websocket"
    if unread or (payload is not None and registry.requires_owner(voice_names(payload))):
        requirements.pinning = VOICE_OWNER
        requirements.mask |= AUDIO


def voice_names(payload: BodyFields) -> Iterator[str]:
    """Names of voices that may be uploaded ones, in lower case, including those of batch items."""
    if not (is_list(payload.items) and is_truthy(payload.items)):
        yield from _named(payload, payload)
    for item in _items_in(payload.items):
        yield from _named(item, payload)


def _named(item: _Item | BodyFields, default: BodyFields) -> Iterator[str]:
    """Fields of an item take precedence over the defaults of its batch."""
    if has_voice_reference(item) or (item is not default and has_voice_reference(default)):
        return
    for voice in (item.voice, item.speaker, default.voice, default.speaker):
        if not is_truthy(voice):
            continue
        name = read_text(voice)
        if name is None and (is_list(voice) or starts_with(voice, b"{") or read_value(voice)):
            return  # the first field with a value decides, even if the value is invalid
        if name is not None:
            if name.lower() != "default":
                yield name.lower()
            return


STEM: Final = "/v1/responses/"
MAX_RESPONSES: Final = 100_000
SCANNED_BYTES: Final = 16 * 1024  # of a response: its id is near the beginning
_OWN_ID: Final = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,251})"')
_ANY_ID: Final = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')


class ResponseOwners(Protocol):
    """Workers by the ids of responses that they stored. `now` is monotonic seconds."""

    def find(self, key: str, now: float) -> Worker | None: ...
    def keep(self, key: str, worker: Worker, now: float) -> None: ...


def own_response_owners() -> ResponseOwners:
    """A table in this process's memory."""
    owners = OwnSessions()
    owners.tune(MAX_RESPONSES, 0)
    return owners


def named_response(path: str, body: bytes) -> str:
    """The response id that a request refers to, in its path or as `previous_response_id`; or ""."""
    if path.startswith(STEM):
        return unquote(path.removeprefix(STEM).partition("/")[0])
    return read_text(keyed_value(body, "previous_response_id")) or ""


def pin_to_response_owner(
    requirements: Requirements, response_id: str, owners: ResponseOwners, now: float
) -> None:
    """Pin the request to the worker that stored the response, if it is known."""
    worker = owners.find(response_id, now) if response_id else None
    if worker is None:
        requirements.pinning = UNPINNED
    else:
        requirements.pinning, requirements.named_worker = NAMED, worker.url


class ResponseIdScanner:
    """Finds the id near the beginning of a response, and passes it to `match` once."""

    __slots__ = ("_found", "_head", "done")

    def __init__(self, match: Callable[[str], None]) -> None:
        self._found = match
        self._head = b""
        self.done = False

    def scan(self, chunk: bytes) -> None:
        """Scan the next bytes. They may be in chunked encoding: an id is rarely split by it."""
        if self.done:
            return
        head = self._head = self._head + chunk[: SCANNED_BYTES - len(self._head)]
        match = _OWN_ID.search(head) or _ANY_ID.search(head)
        if match is None and len(head) < SCANNED_BYTES:
            return
        self.done, self._head = True, b""
        if match is not None:
            self._found(match[1].decode("utf-8", "replace"))
