"""Which process runs which tests where several share a run (`--dist loadfile`).

A file stays in one process, for what its tests share, and so do all files that share the fleets of
replicas, or the syntax trees of all modules: each costs seconds of CPU time. Those with the fleets
begin first, since together they take longest.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling

FLEETS = "the fleets of replicas"
SHARING_FLEETS = {
    f"tests/promises/test_{name}.py"
    for name in (
        "sync_both", "sync_faults", "sync_forms", "sync_late_joiner", "sync_layout", "sync_owner",
        "sync_soak", "version_relay",
    )
}  # fmt: skip
TREES = "the syntax trees"
SHARING_TREES = {f"tests/test_{name}.py" for name in ("checkpoints", "glossary", "layers", "sizes")}


def unit_of(nodeid: str) -> str:
    """What stays together."""
    file = nodeid.split("::", 1)[0]
    if file in SHARING_FLEETS:
        return FLEETS
    return TREES if file in SHARING_TREES else file


def fleets_first(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: unit_of(item.nodeid) != FLEETS)


class SharedFleets(LoadFileScheduling):
    """Units of `unit_of` instead of files."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
