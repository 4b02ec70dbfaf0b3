"""Problems of a configuration text, with path, line, reason and hint; and formatting of keys and
values.

`locate` finds the line of every key in a TOML text, so that a problem can name its line. It works
only for texts that `tomllib` accepts, because it does not check the grammar. Paths are those of the
parsed tables with list indices: the first `[[workers]]` is ("workers", 0).
"""

import difflib
import json
import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    path: str
    line: int | None
    reason: str
    hint: str = ""
    file: str = ""

    def __str__(self) -> str:
        location = self.file if self.line is None else f"{self.file}:{self.line}"
        head = ": ".join(part for part in (location, self.path, self.reason) if part)
        return f"{head}; {self.hint}" if self.hint else head


class ConfigError(Exception):
    """The text is refused; `problems` has all problems, in the order of its lines."""

    def __init__(self, problems: Iterable[Problem], file: str) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line or 0))
        self.file = file
        super().__init__("\n".join(map(str, self.problems)))

    def as_dict(self) -> dict[str, object]:
        return {
            "file": self.file,
            "problems": [
                {"path": p.path, "line": p.line, "reason": p.reason, "hint": p.hint}
                for p in self.problems
            ],
        }


def format_path(path: Path) -> str:
    """For example `workers[1].url`; keys that are not bare TOML keys are quoted."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            is_bare = re.fullmatch(r"[A-Za-z0-9_-]+", step)
            text += ("." if text else "") + (step if is_bare else json.dumps(step))
    return text


SIMILARITY: Final = 0.7  # share of letters in common; below that a match is accidental


def did_you_mean(name: str, names: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=SIMILARITY)
    return f"did you mean `{nearest[0]}`?" if nearest else ""


def to_toml_literal(value: object) -> str:
    """A value as TOML writes it, for messages and generated pages."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


_STRING: Final = re.compile(
    # A multi-line string may have up to two quotes before the closing three.
    r'"""(?:[^\\]|\\.)*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'",
    re.DOTALL,
)
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_SPACE: Final = re.compile(r"[ \t]*")
_TRIVIA: Final = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_SCALAR: Final = re.compile(r"[^,\]}#\n]*")


def locate(text: str) -> dict[Path, int]:
    return _Scanner(text).run()


def nearest_line(lines: dict[Path, int], path: Path) -> int | None:
    """The line of the key, or of the table that lacks it; None if no line has the path."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path)


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line_ends = [match.start() for match in re.finditer("\n", text)]
        self.lines: dict[Path, int] = {}
        self.lengths: dict[Path, int] = {}

    def run(self) -> dict[Path, int]:
        table: Path = ()
        while not self._at_end():
            if self.text.startswith("[[", self.at):
                table = self._array_header()
            elif self.text[self.at] == "[":
                table = self._resolved(self._header(1))
                self._mark_all(table)
            else:
                self._pair(table)
        return self.lines

    def _at_end(self) -> bool:
        self._skip(_TRIVIA)
        return self.at >= len(self.text)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match.group()

    def _mark_all(self, path: Path, names: int = 0) -> None:
        """Record this line for the path, and for each parent table that has no line yet."""
        for length in range(names + 1, len(path) + 1):
            self.lines.setdefault(path[:length], bisect_left(self.line_ends, self.at) + 1)

    def _header(self, brackets: int) -> Path:
        self.at += brackets
        keys = self._keys()
        self.at += brackets
        return keys

    def _array_header(self) -> Path:
        keys = self._header(2)
        array = (*self._resolved(keys[:-1]), keys[-1])
        index = self.lengths.get(array, 0)
        self.lengths[array] = index + 1
        self._mark_all((*array, index))
        return (*array, index)

    def _resolved(self, path: Path) -> Path:
        """The path with the index of the latest element inserted after each array of tables."""
        resolved: Path = ()
        for step in path:
            resolved = (*resolved, step)
            if resolved in self.lengths:
                resolved = (*resolved, self.lengths[resolved] - 1)
        return resolved

    def _keys(self) -> tuple[str, ...]:
        keys: list[str] = []
        while True:
            self._skip(_SPACE)
            quoted = self._skip(_STRING)
            keys.append(tomllib.loads(f"k = {quoted}")["k"] if quoted else self._skip(_BARE_KEY))
            self._skip(_SPACE)
            if self.text[self.at] != ".":
                return tuple(keys)
            self.at += 1

    def _pair(self, table: Path) -> None:
        path = table + self._keys()
        self._mark_all(path, len(table))
        self.at += 1
        self._skip(_SPACE)
        self._value(path)

    def _value(self, path: Path) -> None:
        opening = self.text[self.at]
        if opening == "[":
            self._sequence("]", path)
        elif opening == "{":
            self._sequence("}", path)
        elif not self._skip(_STRING):
            self._skip(_SCALAR)

    def _sequence(self, closing: str, path: Path) -> None:
        self.at += 1
        index = 0
        while not self._at_end() and self.text[self.at] != closing:
            if closing == "}":
                self._pair(path)
            else:
                self._mark_all((*path, index), len(path))
                self._value((*path, index))
                index += 1
            self._skip(_TRIVIA)
            if self.text[self.at] == ",":
                self.at += 1
        self.at += 1
