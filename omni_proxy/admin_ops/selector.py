"""Selectors of the workers that an operation applies to (note:routers 1.8).

    selector = term ("," term)*            all terms must match
    term     = key "=" value | key "!=" value
             | key "in" "(" values ")" | key "notin" "(" values ")"

A worker without the key matches only `!=` and `notin`. An invalid text is refused as a whole, with
the offset of the first unexpected character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_KEY = re.compile(r"[A-Za-z0-9_][\w./-]*", re.ASCII)
_VALUE = re.compile(r"[^\s,()=!]+")
_SPACE = re.compile(r"\s*")


class SelectorError(ValueError):
    """`offset` counts characters from the start of the text."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at offset {offset}")
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Term:
    """`negated`: the value must not be one of `values`."""

    key: str
    values: frozenset[str]
    negated: bool = False

    def holds(self, facts: Mapping[str, str]) -> bool:
        return (facts.get(self.key) in self.values) is not self.negated


@dataclass(frozen=True, slots=True)
class Selector:
    """Without terms it matches every worker."""

    terms: tuple[Term, ...] = ()

    def matches(self, facts: Mapping[str, str]) -> bool:
        return all(term.holds(facts) for term in self.terms)


def parse_selector(text: str) -> Selector:
    """Raises SelectorError."""
    reader = _Reader(text)
    terms = [_term(reader)]
    while not reader.at_end:
        reader.expect(",")
        terms.append(_term(reader))
    return Selector(tuple(terms))


def _term(reader: _Reader) -> Term:
    key = reader.take(_KEY, "a key is missing")
    for sign, negated in (("!=", True), ("=", False)):
        if reader.skip(sign):
            return Term(key, frozenset((reader.take(_VALUE, "a value is missing"),)), negated)
    operator_offset = reader.offset
    name = reader.take(_KEY, "one of =, !=, in, notin is missing")
    if name not in ("in", "notin"):
        raise SelectorError("one of =, !=, in, notin is missing", operator_offset)
    reader.expect("(")
    values = [reader.take(_VALUE, "a value is missing")]
    while reader.skip(","):
        values.append(reader.take(_VALUE, "a value is missing"))
    reader.expect(")")
    return Term(key, frozenset(values), name == "notin")


class _Reader:
    """Always positioned before a non-space character."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.offset = 0
        self._move(0)

    @property
    def at_end(self) -> bool:
        return self.offset == len(self._text)

    def skip(self, sign: str) -> bool:
        match = self._text.startswith(sign, self.offset)
        if match:
            self._move(self.offset + len(sign))
        return match

    def expect(self, sign: str) -> None:
        if not self.skip(sign):
            raise SelectorError(f"{sign!r} is missing", self.offset)

    def take(self, pattern: re.Pattern[str], otherwise: str) -> str:
        match = pattern.match(self._text, self.offset)
        if match is None:
            raise SelectorError(otherwise, self.offset)
        self._move(match.end())
        return match[0]

    def _move(self, offset: int) -> None:
        space = _SPACE.match(self._text, offset)
        self.offset = space.end() if space else offset
