"""Aborts over the fleet: the requests to abort, and translation of the call between engines.

    SGLang  POST /abort_request   {"rid": "a"}  {"rid": "a", "prefix": true}  {"abort_all": true}
    vLLM    POST /abort_requests  {"request_ids": ["a"]}  {} or an empty list for all

Invariant: a call that is already in the engine's dialect is passed on byte for byte. An id is also
recognized in the forms that vLLM makes of it: `chatcmpl-a`, `cmpl-a-0` (prompt 0),
`generate-tokens-a`.
Source: note:features 3.1, note:real-engines 5.1 (contracts), and vLLM 0.32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from omni_proxy.admin_ops.admin_route_table import ABORTS
from omni_proxy.admin_ops.results import AdminResponse, WorkerResult, aggregate
from omni_proxy.wire.errors import bad_request, to_json

MAX_IDS: Final = 100_000  # in one call
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "generate-tokens-")  # of vLLM, before a request's id


class AbortDialect(StrEnum):
    """The dialect of a kind of engine; the value is the path of its route."""

    SGLANG, VLLM = ABORTS

    @property
    def other(self) -> AbortDialect:
        return AbortDialect.VLLM if self is AbortDialect.SGLANG else AbortDialect.SGLANG


class AbortTarget(msgspec.Struct, frozen=True):
    """The requests to abort: those with an id in `ids`, with `prefix` those whose id begins with
    one of `ids`, or all."""

    ids: tuple[str, ...] = ()
    prefix: bool = False
    everything: bool = False

    def matcher(self) -> Callable[[Iterable[str]], Collection[str]]:
        """A function that takes all ids of one request and returns those of `ids` that match it.

        For `everything` it returns [""].
        """
        if self.everything:
            return lambda _: ("",)
        if self.prefix:
            prefixes = self.ids
            return lambda names: [p for p in prefixes if any(name.startswith(p) for name in names)]
        by_form = {form: item for item in self.ids for form in id_forms(item)}
        return lambda names: {by_form[name] for name in names if name in by_form}


class AbortFindings(msgspec.Struct, frozen=True):
    """The requests to abort that one data-plane process has.

    `waiting`: how many were queued there; they have been ended. `known`: ids of the target that it
    found. `running`: worker URL to the ids of its requests.
    """

    waiting: int = 0
    known: tuple[str, ...] = ()
    running: dict[str, tuple[str, ...]] = {}


def id_forms(request_id: str) -> set[str]:
    """The id, and the ids that it has without vLLM's prefixes and suffixes."""
    forms = {request_id}
    for prefix in _PREFIXES:
        if request_id.startswith(prefix):
            bare = request_id.removeprefix(prefix)
            base, dash, number = bare.rpartition("-")
            forms |= {bare, base if dash and number.isdecimal() else bare}
    return forms - {""}


def as_vllm_writes(request_id: str) -> tuple[str, ...]:
    """Ids that vLLM may use for the request; it ignores unknown ones."""
    return (
        request_id, f"chatcmpl-{request_id}", f"cmpl-{request_id}-0",
        f"generate-tokens-{request_id}",
    )  # fmt: skip


def read_target(dialect: AbortDialect, body: bytes) -> AbortTarget:
    """Raises HttpError 400."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise bad_request("invalid JSON body", "invalid_json") from None
    if not isinstance(fields, dict):
        raise bad_request("request body must be a JSON object", "invalid_json")
    if dialect is AbortDialect.VLLM:
        ids = _ids(fields.get("request_ids"), "request_ids")
        return AbortTarget(ids, everything=not ids)
    for name in ("abort_all", "prefix"):
        if not isinstance(fields.get(name), bool | None):
            raise bad_request(f"{name} must be true or false")
    if fields.get("abort_all"):
        return AbortTarget(everything=True)
    ids = _ids(fields.get("rid"), "rid")
    if not ids or "" in ids:
        raise bad_request('name a request: {"rid": "..."}, or all of them: {"abort_all": true}')
    return AbortTarget(ids, prefix=fields.get("prefix") is True)


def _ids(value: object, name: str) -> tuple[str, ...]:
    """The ids in a value: one string or a list. Raises HttpError 400."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if len(values) > MAX_IDS:
        raise bad_request(f"{name} may name at most {MAX_IDS} requests")
    ids = tuple(item for item in values if isinstance(item, str))
    if len(ids) != len(values):
        raise bad_request(f"{name} must be a string or a list of strings")
    try:
        "".join(ids).encode()
    except UnicodeEncodeError:
        raise bad_request(f"{name} contains a lone surrogate") from None
    return ids


def call_bodies(dialect: AbortDialect, target: AbortTarget, running: Sequence[str]) -> list[bytes]:
    """The bodies of the calls in this dialect. `running`: ids of requests at this worker, for an
    engine that does not support prefixes."""
    if dialect is AbortDialect.VLLM:
        if target.everything:
            return [b"{}"]
        known = (target.prefix and running) or target.ids
        return [to_json({"request_ids": [name for item in known for name in as_vllm_writes(item)]})]
    if target.everything:
        return [b'{"abort_all":true}']
    more = {"prefix": True} if target.prefix else {}
    return [to_json({"rid": item, **more}) for item in target.ids]


def merged(findings: Iterable[AbortFindings]) -> AbortFindings:
    """The findings of several processes, merged."""
    waiting, known, running = 0, set[str](), dict[str, tuple[str, ...]]()
    for item in findings:
        waiting += item.waiting
        known.update(item.known)
        for url, ids in item.running.items():
            running[url] = (*running.get(url, ()), *ids)
    return AbortFindings(waiting, tuple(known), running)


def urls_to_call(target: AbortTarget, findings: AbortFindings) -> Collection[str] | None:
    """URLs of the workers that have the requests; None if all workers must be called."""
    is_known = not (target.everything or target.prefix) and set(target.ids) <= set(findings.known)
    return findings.running.keys() if is_known else None


def abort_response(
    dialect: AbortDialect, results: Sequence[WorkerResult], sent_ids: int, waiting: int
) -> AdminResponse:
    """`sent_ids`: number of ids in each call, assumed as the count of replies without one."""
    response = aggregate(dialect.value, results, {})
    body = {**response.body, "ended_in_queue": waiting}
    if dialect is AbortDialect.VLLM:
        count = sum(_aborted(result, sent_ids) for result in results if result.success)
        body |= {"aborted": count + waiting, **({"status": "aborted"} if response.ok else {})}
    return AdminResponse(response.status, body)


def _aborted(result: WorkerResult, sent_ids: int) -> int:
    count = result.body.get("aborted") if isinstance(result.body, dict) else None
    return count if isinstance(count, int) else sent_ids
