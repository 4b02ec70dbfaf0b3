"""Parses the body of POST /weights/rollout. Pure.

Invariant: a body that parses here names exactly one source: a path with a label, or a stored
version. Errors are HttpError 400 with the key and how to fix it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_proxy.config.fields import MAX_SECS
from omni_proxy.wire.errors import HttpError

KEYS: Final = (
    "model_path", "version", "weight_version", "max_unavailable", "canary", "pause_after_canary",
    "drain_secs", "load_format",
)  # fmt: skip
MAX_TEXT_CHARS: Final = 4096
MAX_COUNT: Final = 1_000_000
_PERCENT: Final = re.compile(r"(\d{1,3})%")


@dataclass(frozen=True, slots=True)
class Share:
    """A number of workers, or a percentage of all of them."""

    count: int = 1
    percent: int = 0

    def of(self, total: int) -> int:
        """The number of workers of `total`; a percentage is rounded down, but to at least 1."""
        return max(total * self.percent // 100, 1) if self.percent else self.count


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """`version`: number or label of a stored version, None for `model_path`.

    `weight_version`: "" for the label of the stored version. `drain_secs`: None for the configured
    time, 0 for no deadline.
    """

    model_path: str = ""
    version: int | str | None = None
    weight_version: str = ""
    max_unavailable: Share = Share()
    canary: int = 1
    pause_after_canary: bool = False
    drain_secs: float | None = None
    load_format: str = ""


def parse_rollout(body: Mapping[str, Any]) -> RolloutRequest:
    """Raises HttpError 400 `invalid_rollout`."""
    for key in body:
        if key not in KEYS:
            close = difflib.get_close_matches(str(key)[:64], KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(KEYS)}"
            raise invalid(f"{str(key)[:64]!r} is not a key of a rollout; {hint}")
    version = _version(body)
    request = RolloutRequest(
        model_path=_text(body, "model_path"),
        version=version,
        weight_version=_text(body, "weight_version"),
        max_unavailable=_share(body, "max_unavailable"),
        canary=_count(body, "canary", 0),
        pause_after_canary=_flag(body, "pause_after_canary"),
        drain_secs=_secs(body, "drain_secs"),
        load_format=_text(body, "load_format"),
    )
    _require_source(request)
    return request


def invalid(message: str) -> HttpError:
    return HttpError(400, message, "invalid_rollout", detail=message)


def _require_source(request: RolloutRequest) -> None:
    sources = (bool(request.model_path), request.version is not None)
    if sources == (True, True):
        raise invalid("model_path and version are both given: name one of them")
    if sources == (False, False):
        raise invalid(
            "nothing to roll out: give model_path (a file or folder that the workers can read) "
            "or version (a stored version, see GET /weights/versions)"
        )
    if request.model_path and not request.weight_version:
        raise invalid(
            "weight_version is missing: a label of your choice that no worker has yet, by which "
            "responses and workers with the new weights can be distinguished"
        )
    if request.version is not None and request.load_format:
        raise invalid("load_format is for model_path only: a stored version is safetensors")
    if request.pause_after_canary and not request.canary:
        raise invalid("pause_after_canary needs a canary of at least 1 worker")


def _version(body: Mapping[str, Any]) -> int | str | None:
    value = body.get("version")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise invalid(f"version must be the number or the label of a stored version{_not(value)}")
    return value


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or not value.strip():
        raise invalid(f"{key} must be a non-empty string{_not(value)}")
    if len(value) > MAX_TEXT_CHARS or not value.isprintable():
        raise invalid(f"{key} must be printable, and at most {MAX_TEXT_CHARS} characters long")
    return value


def _share(body: Mapping[str, Any], key: str) -> Share:
    value = body.get(key)
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())):
        percent = int(match[1])
        if not 1 <= percent <= 100:
            raise invalid(f"{key} must be within 1% and 100%{_not(value)}")
        return Share(0, percent)
    if isinstance(value, str):
        raise invalid(
            f'{key} must be a whole number of workers, or a percentage as in "25%"{_not(value)}'
        )
    return Share(_count(body, key, 1))


def _count(body: Mapping[str, Any], key: str, minimum: int) -> int:
    value = body.get(key)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_COUNT:
        raise invalid(f"{key} must be a whole number of workers, at least {minimum}{_not(value)}")
    return value


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{key} must be true or false{_not(value)}")
    return value is True


def _secs(body: Mapping[str, Any], key: str) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 <= value <= MAX_SECS:
        raise invalid(f"{key} must be a number of seconds, 0 for no deadline{_not(value)}")
    return float(value)


def _not(value: object) -> str:
    return f", not {repr(value)[:80]}"
