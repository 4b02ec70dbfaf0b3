"""The data-parallel rank that a client requests, and the body key that passes a rank to an engine.

A client may choose a rank by the header `X-data-parallel-rank` or by a key of a JSON body. Pure.
Invariant: the engine gets the rank that the client chose, or the request is refused. Without ranks
in the fleet nothing here runs, and the engines handle such a header or key themselves.
Source: features.md 8 (which engine reads the rank from where, by route).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.body_fields import as_utf8
from omni_proxy.routing.inspect.json_splice import find_members, splice_parts
from omni_proxy.routing.inspect.large_json import JsonMember, key_text
from omni_proxy.routing.inspect.requirements import ANY_RANK, Requirements
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RANK_HINT

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
_HIGHEST: Final = 1 << 31
_MAX_DIGITS: Final = len(str(_HIGHEST))
# Stands for the members of a large body, for `splice_parts`: the body is an object and not empty.
_SOME_MEMBER: Final = (JsonMember(b"", 0, 0, 0),)


def may_name_rank(body: bytes) -> bool:
    """Whether the body may contain one of the keys; fast."""
    # `find` instead of `in`, which is slower: it raises and clears an error internally.
    return (
        body.find(_COMMON_PART) >= 0
        or (body.find(_BACKSLASH) >= 0 and body.find(_ESCAPE) >= 0)
        or body.find(_NUL, 0, 2) >= 0  # `_is_of_other_encoding`, inlined
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
        named = " and ".join(f"{where} {rank}" for where, rank in chosen.items())
        raise _bad(f"the request names two data-parallel ranks: {named}")
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
    found: set[str] = set()
    for member in find_members(body, _start(body)):
        name = key_text(member.name)
        if name in _KEYS:
            if name in found:
                message = f"the key {name!r} is in the body twice"
                raise HttpError(400, message, "duplicate_key")
            found.add(name)
            yield name, body[member.value_at : member.end]


def _start(body: bytes) -> int:
    return max(0, body.find(b"{"))


def _rank(where: str, value: bytes) -> int:
    """Raises HttpError 400."""
    text = value.strip()
    rank = int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else _HIGHEST
    if rank >= _HIGHEST:
        shown = text[:40].decode("latin-1")
        raise _bad(f"{where}: {shown!r} is not a data-parallel rank; use a number, 0 or more")
    return rank


def _bad(message: str) -> HttpError:
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
    why = "is full or out of rotation" if index < max(1, ranks) else "does not exist"
    return _bad(f"data-parallel rank {index} {why}; ranks that can take this request: {free}")


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
