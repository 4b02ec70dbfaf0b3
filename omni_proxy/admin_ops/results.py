"""Results of workers, merged into one response (note:omni-router 11.1).

A worker succeeded if it returned a 2xx whose JSON has no `"success": false`. The operation
succeeded if all workers did: 200, else 502 with every result. GET /model_info (11.3): a field has
the value that all reporting workers agree on, else null; several weight versions are a 409.
GET /get_weights_by_name (note:api-server 9.1): the array that all workers return, else an error
with every result. The JSON is the engines' format, which this module defines. Invariant: `success`,
`message` and `status` are at the top level of every response and every error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from omni_proxy.admin_ops.engine_dialects import (
    IS_PAUSED,
    IS_SLEEPING,
    MODEL_INFO,
    WEIGHT_CHECKER,
    WORLD_SIZE,
)
from omni_proxy.wire.bounded_json import TooManyValues, read_json, without_lone_surrogates
from omni_proxy.wire.errors import HttpError

FAILED = "one or more workers failed admin request"
# Texts of refusals after which the weights have changed nevertheless: the cache is of the old ones,
# or a swap was interrupted.
CHANGED = (
    "weights were updated",
    "weights updated,",
    "weights are damaged",
    "update is already active",
)
NOT_FLUSHED = "not flushed"
REASON_CHARS = 512
MAX_ANSWER_VALUES = 300_000  # JSON values in one worker's reply, which may list every tensor
MAX_TEXT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """`worker` is its URL. `body` is JSON or text; without a complete response `error` has the
    reason. `sent_to`: the path of the call if it was translated to another dialect, else "".
    """

    worker: str
    status: int | None
    body: object = None
    error: str = ""
    secs: float = 0.0
    sent_to: str = ""

    @property
    def success(self) -> bool:
        denied = isinstance(self.body, dict) and self.body.get("success") is False
        return self._answered and 200 <= (self.status or 0) < 300 and not denied

    @property
    def refused(self) -> bool:
        """Whether the worker returned a 4xx."""
        return self._answered and 400 <= (self.status or 0) < 500

    @property
    def unchanged(self) -> bool:
        """Whether it returned a 4xx, and its text does not say that its weights have changed."""
        sentence = _sentence(self.body).lower()
        return self.refused and not any(phrase in sentence for phrase in CHANGED)

    @property
    def reason(self) -> str:
        """Why it failed, as a short text."""
        if self.error:
            return self.error
        sentence = _sentence(self.body)
        return f"status {self.status}" + (f": {sentence[:REASON_CHARS]}" if sentence else "")

    @property
    def _answered(self) -> bool:
        return self.status is not None and not self.error

    def entry(self) -> dict[str, object]:
        values: dict[str, object] = {"worker": self.worker, "success": self.success}
        if self.status is not None:
            values["status_code"] = self.status
        if self._answered:
            values["body"] = self.body
        if self.error:
            values["error"] = self.error
        if self.sent_to:
            values["sent_to"] = self.sent_to
        return {**values, "seconds": self.secs}


@dataclass(frozen=True, slots=True)
class AdminResponse:
    """The response to the caller."""

    status: int
    body: Mapping[str, object]
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status < 300


def aggregate(
    path: str, answers: Sequence[WorkerResult], more: Mapping[str, Mapping[str, object]]
) -> AdminResponse:
    """`more`: fields to add to a worker's entry, by its URL."""
    success = all(result.success for result in answers)
    body = {
        "success": success,
        "message": "ok" if success else FAILED,
        "status": "ok" if success else "error",
        "path": path,
        "worker_count": len(answers),
        "results": [{**result.entry(), **more.get(result.worker, {})} for result in answers],
    }
    return AdminResponse(200 if success else 502, body)


def refused(refusal: HttpError) -> AdminResponse:
    """A refusal by the proxy, with the top-level keys that clients of these routes read."""
    values = json.loads(refusal.body())
    top = {"success": False, "message": refusal.message, "status": "error"}
    return AdminResponse(refusal.status, {**top, **values}, dict(refusal.headers))


def parsed(raw: bytes) -> object:
    """A body as JSON, else as text; the start of its text if it has too many values."""
    try:
        return without_lone_surrogates(raw, read_json(raw, MAX_ANSWER_VALUES)) if raw else ""
    except TooManyValues:
        return raw[:MAX_TEXT_BYTES].decode("utf-8", "replace")
    except (ValueError, RecursionError):
        return raw.decode("utf-8", "replace")


def _sentence(body: object) -> str:
    """The text of a refusal in either dialect."""
    if isinstance(body, str):
        return body.strip()
    if not isinstance(body, dict):
        return ""
    for key in ("detail", "error", "message"):
        sentence = _sentence(body.get(key))
        if sentence:
            return sentence
    return ""


FACTS = ("weight_version", "model_path", "load_format")


def label_reported(body: object, fact: str) -> list[object]:
    """The distinct values of a fact in a worker's body, at its top level and in its stages."""
    values: list[object] = []
    for container in _places(body):
        value = container.get(fact)
        if value is not None and value not in values:
            values.append(value)
    return values


def version_of(body: object) -> str | None:
    """The label of the worker's weights; None if it reports none, or several."""
    labels = label_reported(body, "weight_version")
    return str(labels[0]) if len(labels) == 1 else None


def merge_model_info(answers: Sequence[WorkerResult], path: str = MODEL_INFO) -> AdminResponse:
    entries = [result.entry() for result in answers]
    body = {
        "path": path,
        "worker_count": len(answers),
        "workers": entries,
        "results": entries,
    }
    if not all(result.success for result in answers):
        message = f"one or more workers failed {path.removeprefix('/')} request"
        return AdminResponse(502, {"success": False, "message": message, "status": "error", **body})
    merged: dict[str, object] = {}
    for fact in FACTS:
        values: list[object] = []
        for result in answers:
            values += [value for value in label_reported(result.body, fact) if value not in values]
        if fact == "weight_version" and len(values) > 1:
            return _mixed(sorted(map(str, values)), body)
        merged[fact] = values[0] if len(values) == 1 else None
    return AdminResponse(200, {"success": True, "message": "ok", "status": "ok", **merged, **body})


def _mixed(versions: list[str], body: dict[str, object]) -> AdminResponse:
    message = "mixed worker weight_version"
    payload = {"success": False, "message": message, "mixed_state": {"weight_version": versions}}
    return AdminResponse(409, {**payload, "status": "error", "detail": {**payload, **body}})


def _places(body: object) -> Iterator[dict[str, object]]:
    if not isinstance(body, dict):
        return
    yield body
    for name in ("stages", "results"):
        stages = body.get(name)
        for stage in stages if isinstance(stages, list) else ():
            data = stage.get("data") if isinstance(stage, dict) else None
            if isinstance(data, dict) and not (data.get("skipped") or data.get("unsupported")):
                yield data


MIXED: Final = "the workers have different values of it"


def merge_weights_by_name(result: AdminResponse) -> tuple[object, int]:
    """Body and status for the caller, from the aggregate of the workers' results."""
    results = result.body.get("results")
    if not isinstance(results, list):
        return result.body, result.status
    if result.ok:
        values = [result["body"] for result in results]
        if all(value == values[0] for value in values):
            return values[0], 200
        return _refusal(result, MIXED), 409
    failed = [result for result in results if not result["success"]]
    codes = {result.get("status_code") for result in results}
    if len(failed) == len(results) and len(codes) == 1 and 400 in codes:
        return _refusal(result, _words(failed[0]["body"]) or str(result.body["message"])), 400
    return _refusal(result, str(result.body["message"])), result.status


def _refusal(result: AdminResponse, message: str) -> dict[str, object]:
    top = {"success": False, "message": message, "status": "error", "error": {"message": message}}
    return {**result.body, **top}


def _words(body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    phrase = error.get("message") if isinstance(error, dict) else None
    return phrase if isinstance(phrase, str) else ""


OURS: Final = frozenset(
    ("success", "path", "worker_count", "results", "error", "seconds", "detail")
)
MAX_KEYS: Final = 64  # keys of a body that are compared
MAX_ITEMS: Final = 16
DIFFERENT_WEIGHTS: Final = "the workers have different weights"


def as_one(path: str, response: AdminResponse, results: Sequence[WorkerResult]) -> AdminResponse:
    """The response in the form of a single engine. `response`: the aggregate of `results`, which
    are of the route with this path."""
    if not response.ok:
        return _refused_alike(response, results)
    bodies = [result.body if isinstance(result.body, dict) else {} for result in results]
    same_dialect = not any(result.sent_to for result in results)
    body = {**response.body, **(_agreed(bodies) if same_dialect else {})}
    if (merge := _MERGED.get(path)) is not None:
        body |= merge(bodies)
    if path == WEIGHT_CHECKER:
        checksums = [
            sums for one_body in bodies if isinstance(sums := one_body.get("checksums"), dict)
        ]
        if _differ(checksums):
            top = {"success": False, "status": "error", "message": DIFFERENT_WEIGHTS}
            return AdminResponse(409, {**response.body, **top})
        if checksums and all(sums == checksums[0] for sums in checksums):
            body["checksums"] = checksums[0]
    return replace(response, body=body)


def _agreed(bodies: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Short keys with the same value in all bodies, except those of the proxy's own response."""
    if not bodies:
        return {}
    first, *rest = bodies
    words = {key: first[key] for key in islice(first, MAX_KEYS) if key not in OURS}
    return {
        key: value
        for key, value in words.items()
        if _is_short(value) and all(key in body and body[key] == value for body in rest)
    }


def _is_short(value: object) -> bool:
    """Whether a value is compared and repeated; long values are only in the results."""
    if isinstance(value, dict):
        return False
    if not isinstance(value, list):
        return True
    return len(value) <= MAX_ITEMS and not any(isinstance(item, list | dict) for item in value)


def _world_size(bodies: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The sum over all workers; SGLang reports its ranks as `tp_size` of /server_info."""
    values = [body.get("world_size", body.get("tp_size", 1)) for body in bodies]
    return {"world_size": sum(value for value in values if isinstance(value, int))}


def _all_of(key: str) -> Callable[[Sequence[Mapping[str, object]]], dict[str, object]]:
    def merge(bodies: Sequence[Mapping[str, object]]) -> dict[str, object]:
        return {key: all(body.get(key) is True for body in bodies)}

    return merge


def _match(bodies: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The result of a comparison with a baseline: true if all workers match."""
    if not all("match" in body for body in bodies):
        return {}
    differing: set[str] = set()
    for body in bodies:
        names = body.get("mismatches")
        differing |= set(map(str, names)) if isinstance(names, list) else set()
    return {"match": all(body["match"] is True for body in bodies), "mismatches": sorted(differing)}


def _differ(checksums: Sequence[Mapping[str, object]]) -> bool:
    """Whether two workers with the same tensors and ranks report different checksums."""
    first = checksums[0] if checksums else {}
    return any(first.keys() == sums.keys() and first != sums for sums in checksums[1:])


_MERGED: Final[Mapping[str, Callable[[Sequence[Mapping[str, object]]], dict[str, object]]]] = {
    WORLD_SIZE: _world_size,
    IS_PAUSED: _all_of("is_paused"),
    IS_SLEEPING: _all_of("is_sleeping"),
    WEIGHT_CHECKER: _match,
}


def _refused_alike(response: AdminResponse, results: Sequence[WorkerResult]) -> AdminResponse:
    statuses = {result.status for result in results}
    if len(statuses) != 1 or not all(result.refused for result in results):
        return response
    (status,) = statuses
    first = results[0]
    return AdminResponse(
        status or 502, {**response.body, "message": f"{first.worker}: {first.reason}"}
    )
