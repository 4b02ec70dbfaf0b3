"""The versions of weights that a proxy keeps, as GET /weights/versions tells them, in words.

PURE. Invariant: what is asked about before a rollback is what will be asked for: a version is meant
by its label, else by its number, and of several with one label it is the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from omni_proxy.cli.finding import Told
from omni_proxy.cli.fleet_changes import Refused
from omni_proxy.cli.tables import NOTHING, age, moment, plain, size, table

_HEAD: Final = ("VERSION", "NUMBER", "EPOCH", "STATE", "RECEIVED", "SIZE", "IN", "CHECKSUM")
_CHECKSUM_CHARS: Final = 12
_NONE_KEPT: Final = (
    'no versions are kept: that takes [weight_sync] mode = "receive" or "both" in the proxy\'s file'
)


def listed(told: Told, now: datetime) -> list[str]:
    """The newest first, as they were told."""
    rows = [_cells(version, now) for version in told.get("versions") or ()]
    if not rows:
        return [_nothing(told)]
    trouble = [_nothing(told)] if told.get("error") else []
    return [*trouble, *table(_HEAD, rows, right=("NUMBER", "EPOCH", "SIZE"))]


def _nothing(told: Told) -> str:
    if told.get("error"):
        return f"the versions can't be kept: {plain(told['error'])}"
    return f"no versions yet in {plain(told['store'])}" if told.get("store") else _NONE_KEPT


def _cells(version: Told, now: datetime) -> Sequence[object]:
    at = moment(version.get("created_at"))
    places = [name for name in ("memory", "disk") if version.get(f"{_WORD[name]}_{name}")]
    return (
        version["version"],
        version["number"],
        version.get("weight_epoch") or NOTHING,
        _state(version),
        f"{age((now - at).total_seconds())} ago" if at else NOTHING,
        size(version.get("bytes", 0)),
        "+".join(places) or NOTHING,
        str(version.get("checksum") or NOTHING)[:_CHECKSUM_CHARS],
    )


_WORD: Final = {"memory": "in", "disk": "on"}


def _state(version: Told) -> str:
    if version.get("current"):
        return "current"
    return "kept" if version.get("published") else "incomplete"


def meant(told: Told, wanted: str | None) -> Told:
    """By default the one before the current. Raises Refused, which names those that there are."""
    versions: list[Told] = told.get("versions") or []
    if not versions:
        raise Refused(_nothing(told))
    if wanted is None:
        published = sorted(filter(_epoch, versions), key=_epoch, reverse=True)
        if len(published) < 2:
            raise Refused(f"there is no version before the current one; {_those(versions)}")
        return published[1]
    labelled = [version for version in versions if version["version"] == wanted]
    numbered = [version for version in versions if str(version["number"]) == wanted]
    if not labelled and not numbered:
        raise Refused(f"no version is called {wanted}; {_those(versions)}")
    return max(labelled or numbered, key=lambda version: (_epoch(version), version["number"]))


def _epoch(version: Told) -> int:
    return int(version.get("weight_epoch") or 0)


def _those(versions: Sequence[Told]) -> str:
    return f"there are: {', '.join(map(called, versions))}"


def called(version: Told) -> str:
    label, number = plain(version["version"]), version["number"]
    return f"version {number}" if label == str(number) else f"{label} (version {number})"


def question(version: Told) -> str:
    """What it means to go to that one."""
    more = ""
    if version.get("current"):
        more = ", which is the current one,"
    elif not version.get("published"):
        more = ", which was never on all workers,"
    return f"Give {called(version)}{more} to all workers?"
