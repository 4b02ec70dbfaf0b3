"""Label selectors of Kubernetes: parsed from their text, and matched against the labels of a pod.

Invariant: a text that `parse_selector` accepts selects the same pods as on an API server. Pure.
Source: Kubernetes, "Labels and Selectors": `=`, `==`, `!=`, `in`, `notin`, `KEY` and `!KEY`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from omni_proxy.config.problem import to_toml_literal

_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY: Final = rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_NAME}"
_VALUE: Final = rf"(?:{_NAME})?"
_EQUAL: Final = re.compile(rf"({_KEY})\s*(=|==|!=)\s*({_VALUE})")
_IN_SET: Final = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)")
_EXISTS: Final = re.compile(rf"(!?)\s*({_KEY})")
_LABEL_KEY: Final = re.compile(_KEY)
_LABEL_VALUE: Final = re.compile(_VALUE)
_COMMA: Final = re.compile(r",(?![^()]*\))")  # not inside the parentheses of a set

Operator: TypeAlias = Literal["in", "notin", "exists", "absent"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One term of a selector; labels have to match all of its terms."""

    key: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "in":
                return labels.get(self.key) in self.values
            case "notin":  # matches if the label is missing, too
                return labels.get(self.key) not in self.values
            case "exists":
                return self.key in labels
            case "absent":
                return self.key not in labels


Selector: TypeAlias = tuple[Requirement, ...]


def parse_selector(text: str) -> Selector:
    """The empty selector matches everything. Raises ValueError with a reason."""
    if not text.strip():
        return ()
    return tuple(_requirement(term.strip()) for term in _COMMA.split(text))


def matches(selector: Selector, labels: Mapping[str, str]) -> bool:
    return all(requirement.matches(labels) for requirement in selector)


def is_label_key(text: str) -> bool:
    return _LABEL_KEY.fullmatch(text) is not None


def _requirement(term: str) -> Requirement:
    if match := _EQUAL.fullmatch(term):
        operator: Operator = "notin" if match[2] == "!=" else "in"
        return Requirement(match[1], operator, frozenset((match[3],)))
    if match := _IN_SET.fullmatch(term):
        values = [value.strip() for value in match[3].split(",")]
        if all(map(_LABEL_VALUE.fullmatch, values)):
            return Requirement(match[1], "in" if match[2] == "in" else "notin", frozenset(values))
    if match := _EXISTS.fullmatch(term):
        return Requirement(match[2], "absent" if match[1] else "exists")
    raise ValueError(
        f"{to_toml_literal(term)} is not a term of a label selector",
        'write "app=sglang", "tier in (a, b)", "app!=x" or "!draft", joined by commas',
    )
