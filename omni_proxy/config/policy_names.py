"""The names that `[routing] policy` takes: the built-in policies, installed ones, and a class.

`POLICIES` is the one list of the built-in names: the parser, `--help`, shell completion and the
tests of the documentation read it. Invariant: a built-in name always means the built-in policy;
an installed package can't replace it. Nothing is imported here: `routing.policies.plugins` loads.
"""

import re
from importlib.metadata import entry_points
from typing import Final

from omni_proxy.config.problem import did_you_mean

POLICIES: Final = (
    "round_robin", "least_request", "random", "power_of_two", "cache_aware",
    "consistent_hashing", "prefix_hash",
)  # fmt: skip
ENTRY_POINT_GROUP: Final = "omni_proxy.policies"
CLASS_PATH: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")  # package.module:Class


def installed_policies() -> list[str]:
    """The names of the entry point group, sorted, without those of built-in policies."""
    return sorted(entry_points(group=ENTRY_POINT_GROUP).names - set(POLICIES))


def read_policy(value: object) -> object:
    """A policy's name, checked for a known one or the form of a class path.

    Raises ValueError(reason, hint).
    """
    if not isinstance(value, str) or value in POLICIES or CLASS_PATH.fullmatch(value):
        return value
    if ":" in value:
        raise ValueError(f'"{value}" is no class path', 'write it as "package.module:Class"')
    known = sorted([*POLICIES, *installed_policies()])
    if value in known:
        return value
    hint = did_you_mean(value, known) or (
        f'a policy of your own is "package.module:Class" or an entry point of {ENTRY_POINT_GROUP}'
    )
    raise ValueError(f'"{value}" is not one of {", ".join(known)}', hint)
