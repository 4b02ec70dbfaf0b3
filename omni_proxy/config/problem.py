"""What is wrong with a text, said so that its author can mend it: where, what, and how."""

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
    """A text was refused; `problems` has everything that was found, in the order of the text."""

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
    """`workers[1].url`, with quotes round what TOML would want quoted."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", step)
            text += ("." if text else "") + (step if bare else json.dumps(step))
    return text


CUTOFF: Final = 0.7  # the share of letters in common; with fewer the likeness is chance


def did_you_mean(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=CUTOFF)
    return f"did you mean `{nearest[0]}`?" if nearest else ""


# A value as a person would write it in FILE, for messages and generated pages.


def to_toml_literal(value: object) -> str:
    """Booleans in lower case, strings in quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
