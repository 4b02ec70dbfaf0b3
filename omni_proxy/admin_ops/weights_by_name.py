"""GET /get_weights_by_name of many workers as one: the array that all have (api-server.md 9.1).

If they differ, the response is an error with every part: one worker's weights must not stand for
all.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.admin_ops.results import AdminResponse

PATH: Final = "/get_weights_by_name"
MIXED: Final = "the workers have different values of it"


def merge(answer: AdminResponse) -> tuple[object, int]:
    """Body and status for the caller, of the aggregate of what the workers answered."""
    results = answer.body.get("results")
    if not isinstance(results, list):
        return answer.body, answer.status
    if answer.ok:
        values = [each["body"] for each in results]
        if all(value == values[0] for value in values):
            return values[0], 200
        return _refusal(answer, MIXED), 409
    failed = [each for each in results if not each["success"]]
    codes = {each.get("status_code") for each in results}
    if len(failed) == len(results) and len(codes) == 1 and 400 in codes:
        return _refusal(answer, _words(failed[0]["body"]) or str(answer.body["message"])), 400
    return _refusal(answer, str(answer.body["message"])), answer.status


def _refusal(answer: AdminResponse, message: str) -> dict[str, object]:
    top = {"success": False, "message": message, "status": "error", "error": {"message": message}}
    return {**answer.body, **top}


def _words(body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    words = error.get("message") if isinstance(error, dict) else None
    return words if isinstance(words, str) else ""
