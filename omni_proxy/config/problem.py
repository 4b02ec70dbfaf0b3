"""Problems of a configuration text: where, what, and a hint; and how keys and values are
printed."""

import difflib
import json
import re
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
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        head = ": ".join(part for part in (place, self.path, self.reason) if part)
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
    """`workers[1].url`; a key that TOML needs quoted is in quotes."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", step)
            text += ("." if text else "") + (step if bare else json.dumps(step))
    return text


SIMILARITY: Final = 0.7  # share of letters in common; below that a match is chance


def did_you_mean(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=SIMILARITY)
    return f"did you mean `{nearest[0]}`?" if nearest else ""


def to_toml_literal(value: object) -> str:
    """A value as TOML writes it, for messages and generated pages."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
