"""What a trainer hears of a grouped sync: every member's own part, and one verdict at the top.

Invariant: `success`, `message` and `status` stand at the top of each, and never disagree with the
status code; `num_buckets_received` is what one member counted (two-phase.md 1.3, 1.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from omni_proxy.admin_ops.results import AdminResponse, WorkerResult, aggregate
from omni_proxy.weight_sync.protocol.session import SyncSession

READY: Final = "ready"
NOT_AWAITED: Final = "its answer was not waited for"
COUNTED: Final = "num_buckets_received"
# Copied where the members agree: what a trainer reads of a complete beside its success.
COPIED: Final = ("cache_epoch", "cache_version", "fp8_kv_cache_postprocess_ran",
                 "fp8_kv_cache_static_scales_updated")  # fmt: skip


@dataclass(frozen=True, slots=True)
class SyncFailed:
    """`cause`: the first one. `status` where that was no member's answer."""

    cause: str = ""
    status: int = 0


WENT: Final = SyncFailed()


def merged(
    path: str, answers: Sequence[WorkerResult], session: SyncSession, failed: SyncFailed = WENT
) -> AdminResponse:
    """Of every member's answer; `failed` where not everybody did it."""
    standings = session.standings()
    more = {name: {"standing": standing} for name, standing in standings.items()}
    answer = aggregate(path, answers, more)
    if not failed.cause and answer.ok:
        return answer
    top = {"success": False, "message": failed.cause or answer.body["message"], "status": "error"}
    return AdminResponse(failed.status or _code(answers, failed.cause), {**answer.body, **top})


def as_ready(answer: AdminResponse) -> AdminResponse:
    """A prepare that went well, in both vocabularies."""
    return replace(answer, body={**answer.body, "status": READY}) if answer.ok else answer


def with_counts(answer: AdminResponse, answers: Sequence[WorkerResult]) -> AdminResponse:
    counts = [found for each in answers if (found := _told(each.body, COUNTED)) is not None]
    numbers = [count for count in counts if isinstance(count, int)]
    told: dict[str, object] = {COUNTED: min(numbers)} if numbers else {}
    for name in COPIED:
        values = [_told(each.body, name) for each in answers]
        if values and values[0] is not None and all(value == values[0] for value in values):
            told[name] = values[0]
    return replace(answer, body={**answer.body, **told})


def bytes_in(answer: WorkerResult) -> int:
    """How many it says that it received; 0 where it does not say."""
    found = _told(answer.body, "bytes")
    return found if isinstance(found, int) else 0


def _code(answers: Sequence[WorkerResult], cause: str) -> int:
    """A member's plain refusal is the trainer's to mend; anything else is ours.

    That of the first cause, where it is a member's: the others' refusals may just follow from it.
    """
    failed = [each for each in answers if not each.success and each.error != NOT_AWAITED]
    named = [each for each in failed if cause == f"{each.worker}: {each.why}"]
    return 400 if failed and (named or failed)[0].refused else 502


def _told(body: object, name: str) -> object:
    return next((place[name] for place in _places(body) if place.get(name) is not None), None)


def _places(body: object) -> Iterator[Mapping[str, object]]:
    """The top of it, then stage by stage."""
    if not isinstance(body, dict):
        return
    yield body
    results = body.get("results")
    for row in results if isinstance(results, list) else ():
        data = row.get("data") if isinstance(row, dict) else None
        if isinstance(data, dict):
            yield data
