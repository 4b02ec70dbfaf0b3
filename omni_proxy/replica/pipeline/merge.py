"""How the results of several stages become one.

Invariant: a merge of terminals returns `{stage: result}`; a fan-in returns one stage's `data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_terminals(results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every result under its stage's name."""
    return dict(results)


def merge_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fan-in for stages whose results have different keys; of a shared key the last one stays."""
    merged: dict[str, Any] = {}
    for result in data.values():
        merged |= result
    return merged
