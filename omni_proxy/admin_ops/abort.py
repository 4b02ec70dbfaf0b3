"""Aborts over the fleet: which requests are meant, and the same in the words of either engine.

    SGLang  POST /abort_request   {"rid": "a"}  {"rid": "a", "prefix": true}  {"abort_all": true}
    vLLM    POST /abort_requests  {"request_ids": ["a"]}  {} for all

Invariant: a call that is written in an engine's own words is passed on byte for byte. An id is
recognized also with the prefix that vLLM puts before it in responses. Source: features.md 3.1,
real-engines.md 5.1 (contracts).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from omni_proxy.admin_ops.results import AdminResponse, WorkerResult, aggregate
from omni_proxy.admin_ops.routes import ABORTS
from omni_proxy.wire.errors import HttpError, to_json

MAX_IDS: Final = 100_000  # in one call
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "generate-tokens-")  # of vLLM, before a request's id


class AbortWords(StrEnum):
    """Whose route it is: the path of each engine's own."""

    SGLANG, VLLM = ABORTS

    @property
    def other(self) -> AbortWords:
        return AbortWords.VLLM if self is AbortWords.SGLANG else AbortWords.SGLANG


class AbortTarget(msgspec.Struct, frozen=True):
    """The requests that are meant: those of `ids`, those whose id begins with one of them
    (`prefix`), or all."""

    ids: tuple[str, ...] = ()
    prefix: bool = False
    everything: bool = False

    def matcher(self) -> Callable[[Iterable[str]], Collection[str]]:
        """A function of the ids that one request goes by; it returns those of `ids` that mean it.

        For `everything` that is [""].
        """
        if self.everything:
            return lambda _: ("",)
        if self.prefix:
            ids = self.ids
            return lambda worker_ids: [
                w for w in ids if any(item.startswith(w) for item in worker_ids)
            ]
        by_spelling = {spelling: item for item in self.ids for spelling in spellings(item)}
        return lambda worker_ids: {by_spelling[item] for item in worker_ids if item in by_spelling}


class AbortFindings(msgspec.Struct, frozen=True):
    """What one data-plane process knew of the requests that are meant.

    `waiting`: how many waited there, and have ended. `known`: those of the target's ids that it
    found. `running`: worker URL to the ids of its requests.
    """

    waiting: int = 0
    known: tuple[str, ...] = ()
    running: dict[str, tuple[str, ...]] = {}


def spellings(request_id: str) -> set[str]:
    """The id, and what it would be without a prefix of vLLM."""
    return {request_id, *(request_id.removeprefix(item) for item in _PREFIXES)} - {""}


def read_target(dialect: AbortWords, body: bytes) -> AbortTarget:
    """Raises HttpError 400."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise _bad("invalid JSON body", "invalid_json") from None
    if not isinstance(fields, dict):
        raise _bad("request body must be a JSON object", "invalid_json")
    if dialect is AbortWords.VLLM:
        if fields.get("request_ids") is None:
            return AbortTarget(everything=True)
        return AbortTarget(_ids(fields["request_ids"], "request_ids"))
    for name in ("abort_all", "prefix"):
        if not isinstance(fields.get(name), bool | None):
            raise _bad(f"{name} must be true or false")
    if fields.get("abort_all"):
        return AbortTarget(everything=True)
    ids = _ids(fields.get("rid"), "rid")
    if not ids or "" in ids:
        raise _bad('name a request: {"rid": "..."}, or all of them: {"abort_all": true}')
    return AbortTarget(ids, prefix=fields.get("prefix") is True)


def _ids(value: object, name: str) -> tuple[str, ...]:
    """One or a list of them. Raises HttpError 400."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if len(values) > MAX_IDS:
        raise _bad(f"{name} may name {MAX_IDS} requests and no more")
    ids = tuple(item for item in values if isinstance(item, str))
    if len(ids) != len(values):
        raise _bad(f"{name} must be a string or a list of strings")
    try:
        "".join(ids).encode()
    except UnicodeEncodeError:
        raise _bad(f"{name} has half a character, which no request can be named by") from None
    return ids


def _bad(message: str, code: str = "invalid_request") -> HttpError:
    return HttpError(400, message, code)


def in_words(dialect: AbortWords, target: AbortTarget, running: Sequence[str]) -> list[bytes]:
    """The bodies of the calls that say it in these words. `running`: the ids that this worker is
    known to have, for an engine that knows no prefixes."""
    if dialect is AbortWords.VLLM:
        if target.everything:
            return [b"{}"]
        return [to_json({"request_ids": list((target.prefix and running) or target.ids)})]
    if target.everything:
        return [b'{"abort_all":true}']
    more = {"prefix": True} if target.prefix else {}
    return [to_json({"rid": item, **more}) for item in target.ids]


def merged(findings: Iterable[AbortFindings]) -> AbortFindings:
    """Of several processes."""
    waiting, sent, running = 0, set[str](), dict[str, tuple[str, ...]]()
    for item in findings:
        waiting += item.waiting
        sent.update(item.known)
        for url, ids in item.running.items():
            running[url] = (*running.get(url, ()), *ids)
    return AbortFindings(waiting, tuple(sent), running)


def urls_to_ask(target: AbortTarget, findings: AbortFindings) -> Collection[str] | None:
    """The workers that have what is meant; None where only asking all of them makes sure."""
    is_known = not (target.everything or target.prefix) and set(target.ids) <= set(findings.known)
    return findings.running.keys() if is_known else None


def abort_response(
    dialect: AbortWords, results: Sequence[WorkerResult], sent_ids: int, waiting: int
) -> AdminResponse:
    """`sent_ids`: how many ids each call named; an engine that tells no number counts for that."""
    response = aggregate(dialect.value, results, {})
    body = {**response.body, "ended_in_queue": waiting}
    if dialect is AbortWords.VLLM:
        count = sum(_aborted(result, sent_ids) for result in results if result.success)
        body |= {"aborted": count + waiting, **({"status": "aborted"} if response.ok else {})}
    return AdminResponse(response.status, body)


def _aborted(result: WorkerResult, sent_ids: int) -> int:
    count = result.body.get("aborted") if isinstance(result.body, dict) else None
    return count if isinstance(count, int) else sent_ids
