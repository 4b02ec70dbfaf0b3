"""A pipeline configuration from a TOML file.

Invariant: every key is known and of its type, or the file is refused with all problems at once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omni_proxy.replica.pipeline.config import (
    PipelineConfig,
    PipelineConfigError,
    StageConfig,
    closest_name_hint,
    validate_config,
)


def load_pipeline(path: str | Path) -> PipelineConfig:
    """Read and validate the file; raises PipelineConfigError with one line per problem."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PipelineConfigError([f"{path}: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PipelineConfigError([f"{path}: not a TOML file: {error}"]) from error
    return parse_pipeline(table)


def parse_pipeline(table: Mapping[str, Any]) -> PipelineConfig:
    """The same for a parsed table."""
    problems: list[str] = []
    values = _read(table, _PIPELINE, "", problems)
    stages = []
    stage_tables = values.pop("stages", [])
    for index, stage in enumerate(stage_tables):
        path = f"stages[{index}]"
        if isinstance(stage, dict):
            stages.append(_read(stage, _STAGE, f"{path}.", problems))
        else:
            problems.append(f"{path}: expected a table")
    if "name" not in table:
        problems.append("name: is missing")
    for index, stage in enumerate(stage_tables):
        if isinstance(stage, dict):
            missing = {"name", "factory"} - stage.keys()
            problems += [f"stages[{index}].{key}: is missing" for key in sorted(missing)]
    if problems:
        raise PipelineConfigError(problems)
    return validate_config(PipelineConfig(**values, stages=tuple(StageConfig(**s) for s in stages)))


FieldParser = Callable[[Any], Any]


def _read(
    table: Mapping[str, Any], fields: Mapping[str, FieldParser], prefix: str, problems: list[str]
) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        if key not in fields:
            problems.append(f"{prefix}{key}: unknown key{closest_name_hint(key, fields)}")
            continue
        try:
            values[key] = fields[key](value)
        except TypeError as error:
            problems.append(f"{prefix}{key}: {error}")
    return values


def _of_type(kind: type, named: str) -> FieldParser:
    def read(value: Any) -> Any:
        # TOML keeps true and 1 apart; Python does not.
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise TypeError(f"expected {named}, got {value!r}")
        return value

    return read


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"expected a stage's name or a list of names, got {value!r}")
    return tuple(value)


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise TypeError(f"expected a table of strings, got {value!r}")
    return value


_text = _of_type(str, "a string")
_PIPELINE: Mapping[str, FieldParser] = {
    "name": _text,
    "model_path": _text,
    "entry": _text,
    "entries": _texts,
    "terminal_merge": _text,
    "max_in_flight": _of_type(int, "a whole number"),
    "stages": _of_type(list, "tables: write [[stages]]"),
}
_STAGE: Mapping[str, FieldParser] = {
    "name": _text,
    "factory": _text,
    "next": _names,
    "terminal": _of_type(bool, "true or false"),
    "route": _text,
    "wait_for": _names,
    "merge": _text,
    "stream_to": _names,
    "process": _text,
    "params": _of_type(dict, "a table"),
    "env": _texts,
}
