"""GET /model_info of many workers as one (omni-router.md 11.3).

A field is set if all workers that report it agree, else null; weights of several versions are a
409. Stages that were skipped report nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omni_proxy.admin_ops.results import AdminResponse, WorkerResult

FACTS = ("weight_version", "model_path", "load_format")
PATH = "/model_info"


def told_of(body: object, fact: str) -> list[object]:
    """What a worker's body says of a fact, each value once: at its top, and stage by stage."""
    found: list[object] = []
    for place in _places(body):
        value = place.get(fact)
        if value is not None and value not in found:
            found.append(value)
    return found


def version_of(body: object) -> str | None:
    """The label of its weights; None where it tells none, or several."""
    told = told_of(body, "weight_version")
    return str(told[0]) if len(told) == 1 else None


def merge(answers: Sequence[WorkerResult]) -> AdminResponse:
    entries = [answer.entry() for answer in answers]
    shown = {"path": PATH, "worker_count": len(answers), "workers": entries, "results": entries}
    if not all(answer.success for answer in answers):
        message = "one or more workers failed model_info request"
        return AdminResponse(
            502, {"success": False, "message": message, "status": "error", **shown}
        )
    facts: dict[str, object] = {}
    for fact in FACTS:
        values: list[object] = []
        for answer in answers:
            values += [told for told in told_of(answer.body, fact) if told not in values]
        if fact == "weight_version" and len(values) > 1:
            return _mixed(sorted(map(str, values)), shown)
        facts[fact] = values[0] if len(values) == 1 else None
    return AdminResponse(200, {"success": True, "message": "ok", "status": "ok", **facts, **shown})


def _mixed(versions: list[str], shown: dict[str, object]) -> AdminResponse:
    message = "mixed worker weight_version"
    told = {"success": False, "message": message, "mixed_state": {"weight_version": versions}}
    return AdminResponse(409, {**told, "status": "error", "detail": {**told, **shown}})


def _places(body: object) -> Iterator[dict[str, object]]:
    if not isinstance(body, dict):
        return
    yield body
    for name in ("stages", "results"):
        stages = body.get(name)
        for stage in stages if isinstance(stages, list) else ():
            told = stage.get("data") if isinstance(stage, dict) else None
            if isinstance(told, dict) and not (told.get("skipped") or told.get("unsupported")):
                yield told
