"""Which process runs which tests if several share a run (`--processes`).

The tests of a file stay in one process, since they share fixtures. So do all files that share the
fleets of replicas, or the syntax trees of all modules: each of these costs seconds of CPU time. The
files with fleets begin first, since together they take longest.
"""

from __future__ import annotations

from collections.abc import Sequence

FLEETS = "the fleets of replicas"
SHARING_FLEETS = {
    f"tests/promises/weights/test_{name}.py"
    for name in (
        "sync_both", "sync_faults", "sync_forms", "sync_late_joiner", "sync_layout", "sync_owner",
        "sync_soak", "version_relay",
    )
}  # fmt: skip
TREES = "the syntax trees"
SHARING_TREES = {
    f"tests/{name}.py"
    for name in (
        "telemetry/test_log_texts", "test_checkpoints", "test_comments", "test_docs",
        "test_error_codes", "test_glossary", "test_layers", "test_sizes",
    )
}  # fmt: skip


def unit_of(nodeid: str) -> str:
    """The unit of a test: tests of one unit run in one process."""
    file = nodeid.split("::", 1)[0]
    if file in SHARING_FLEETS:
        return FLEETS
    return TREES if file in SHARING_TREES else file


def units_of(nodeids: Sequence[str]) -> list[list[int]]:
    """The indexes of the tests of each unit, in the order in which the units begin: long ones
    first, so that no process still runs one at the end."""
    units: dict[str, list[int]] = {}
    for index, nodeid in enumerate(nodeids):
        units.setdefault(unit_of(nodeid), []).append(index)
    return [units[name] for name in sorted(units, key=_place)]


def _place(unit: str) -> int:
    first = (FLEETS, "tests/promises/", "tests/replica/", TREES)
    return next((place for place, start in enumerate(first) if unit.startswith(start)), len(first))
