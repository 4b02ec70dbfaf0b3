"""Pipeline configuration: stages, their order and processes; read from TOML, compiled to a plan.

Invariant: a pipeline that passed `validate_config` has no unknown stage name, no cycle and no dead
end. A TOML file with an unknown key or a value of the wrong type is refused, with all problems in
one error. No stage is imported until a plan is compiled; the return values of the plan's routes and
merges are checked before anything is sent. A merge of terminals returns `{stage: result}`, that of
a fan-in returns one stage's `data`.
"""

from __future__ import annotations

import importlib
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any

from omni_proxy.replica.pipeline.stage_messages import OmniRequest, StagePayload

MERGE_TERMINALS = "omni_proxy.replica.pipeline.config:merge_terminals"
# Media that a request may have in addition to text, by the key in its inputs. A task in `entries`
# may be followed by some of them (`chat+audio+image`): that entry is for requests with all of them.
MEDIA = {"audios": "audio", "images": "image", "videos": "video"}


class PipelineConfigError(Exception):
    """The pipeline cannot be built; one line per problem, each naming its configuration key."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One stage. Dotted names are `package.module:function`; an empty string is none.

    `factory(stage_name, **params)` creates its scheduler; `route(payload)` chooses the next stages
    among `next` and `stream_to`; `merge({stage: data})` joins the results of `wait_for` before the
    stage gets them. Stages in `stream_to` get each chunk as it is generated; a target that is also
    in `next` gets nothing else. A `terminal` stage's result is (part of) the response, unless its
    route sends the result on. Stages of one `process` share a child process.
    """

    name: str
    factory: str
    next: tuple[str, ...] = ()
    terminal: bool = False
    route: str = ""
    wait_for: tuple[str, ...] = ()
    merge: str = ""
    stream_to: tuple[str, ...] = ()
    process: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def targets(self) -> tuple[str, ...]:
        """All possible next stages, without duplicates."""
        return tuple(dict.fromkeys((*self.next, *self.stream_to)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """A pipeline. `entries` maps a task to its first stage; other tasks start at `entry`.

    A task may be followed by media (`chat+image`): of the entries whose media the request all has,
    the one with the most media is used, and of those the first in the order of `MEDIA`.
    `max_in_flight` bounds live requests; 0 is no bound.
    """

    name: str
    model_path: str = ""
    entry: str = ""
    entries: Mapping[str, str] = field(default_factory=dict)
    terminal_merge: str = MERGE_TERMINALS
    max_in_flight: int = 0
    stages: tuple[StageConfig, ...] = ()


def validate_config(config: PipelineConfig) -> PipelineConfig:
    """Return the pipeline with its entry filled in.

    Raises PipelineConfigError with all problems.
    """
    if not config.entry and config.stages:
        config = replace(config, entry=config.stages[0].name)
    if problems := list(_problems(config)):
        raise PipelineConfigError(problems)
    return config


def closest_name_hint(name: str, known: Iterable[str]) -> str:
    """A "did you mean" suffix for an error message, or ""."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _problems(config: PipelineConfig) -> Iterator[str]:
    names = tuple(stage.name for stage in config.stages)
    if not config.stages:
        yield "stages: a pipeline needs at least one"
        return
    for name, count in Counter(names).items():
        if count > 1:
            yield f"stages: {count} stages are named {name}"
    yield from _unknown("entry", (config.entry,), names)
    for task, name in config.entries.items():
        yield from _unknown(f"entries.{task}", (name,), names)
        media = task.split("+")[1:]
        if media != [medium for medium in MEDIA.values() if medium in media]:
            known = "".join(f"[+{medium}]" for medium in MEDIA.values())
            yield f"entries.{task}: a task and its media are written TASK{known}"
    if config.max_in_flight < 0:
        yield f"max_in_flight: must be at least 0, got {config.max_in_flight}"
    yield from _dotted("terminal_merge", config.terminal_merge)
    by_name = {stage.name: stage for stage in config.stages}
    for index, stage in enumerate(config.stages):
        for problem in _stage_problems(stage, by_name):
            yield f"stages[{index}].{problem}"
    if not any(stage.terminal for stage in config.stages):
        yield "stages: none is terminal: no request would ever have a result"
    yield from _graph_problems(config, by_name)
    yield from _process_problems(config)


def _unknown(key: str, used: tuple[str, ...], names: tuple[str, ...]) -> Iterator[str]:
    for name in used:
        if name not in names:
            yield f"{key}: no stage is named {name}{closest_name_hint(name, names)}"


def _dotted(key: str, name: str) -> Iterator[str]:
    module, _, function = name.partition(":")
    if not (function.isidentifier() and all(map(str.isidentifier, module.split(".")))):
        yield f"{key}: {name!r} is not of the form package.module:function"


def _stage_problems(stage: StageConfig, by_name: Mapping[str, StageConfig]) -> Iterator[str]:
    names = tuple(by_name)
    if not stage.name:
        yield "name: must not be empty"
    yield from _dotted("factory", stage.factory)
    for key in ("route", "merge"):
        if dotted := getattr(stage, key):
            yield from _dotted(key, dotted)
    for key in ("next", "stream_to", "wait_for"):
        yield from _unknown(key, getattr(stage, key), names)
    if stage.env and not stage.process:
        yield "env: only a stage with a process has its own environment"
    yield from _flow_problems(stage, by_name)


def _flow_problems(stage: StageConfig, by_name: Mapping[str, StageConfig]) -> Iterator[str]:
    if not stage.terminal and not stage.targets:
        yield "next: the stage is not terminal and leads nowhere"
    if stage.route and not stage.targets:
        yield "route: there is no next to choose from"
    if bool(stage.wait_for) != bool(stage.merge):
        yield "wait_for: needs merge, and merge needs wait_for"
    for name in stage.wait_for:
        if name in by_name and stage.name not in by_name[name].next:
            yield f"wait_for: {name} does not have {stage.name} in its next"
    for name in stage.stream_to:
        if name in by_name and by_name[name].wait_for:
            yield f"stream_to: {name} waits for whole results and cannot be streamed into"


def _graph_problems(config: PipelineConfig, by_name: Mapping[str, StageConfig]) -> Iterator[str]:
    state: dict[str, str] = {}
    cycles: list[str] = []

    def visit(name: str) -> None:
        state[name] = "open"
        for target in by_name[name].targets:
            if state.get(target) == "open":
                cycles.append(f"stages: {name} leads back to {target}")
            elif target in by_name and target not in state:
                visit(target)
        state[name] = "done"

    for entry in dict.fromkeys((config.entry, *config.entries.values())):
        if entry in by_name and entry not in state:
            visit(entry)
    yield from cycles
    for index, stage in enumerate(config.stages):
        if stage.name not in state:
            yield f"stages[{index}]: no request ever reaches {stage.name}"


def _process_problems(config: PipelineConfig) -> Iterator[str]:
    seen: dict[tuple[str, str], str] = {}
    for index, stage in enumerate(config.stages):
        for key, value in stage.env.items():
            if seen.setdefault((stage.process, key), value) != value:
                yield (
                    f"stages[{index}].env.{key}: another stage of process {stage.process} "
                    "sets another value"
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
    """Validate a parsed TOML table; raises PipelineConfigError with one line per problem."""
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


def _of_type(kind: type, description: str) -> FieldParser:
    def read(value: Any) -> Any:
        # TOML distinguishes true from 1; in Python, True is an int.
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise TypeError(f"expected {description}, got {value!r}")
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


Route = Callable[[StagePayload], Any]
Merge = Callable[[Mapping[str, Any]], Any]


class FlowError(Exception):
    """The pipeline's routing of a request failed; the text names the stage (HTTP: 500)."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage, as the coordinator uses it."""

    config: StageConfig
    route: Route | None
    merge: Merge | None

    def choose_next(self, payload: StagePayload) -> tuple[str, ...]:
        """The stages that follow for this payload; raises FlowError."""
        targets = self.config.targets
        if self.route is None:
            return targets
        chosen = self.route(payload)
        names = (chosen,) if isinstance(chosen, str) else tuple(chosen or ())
        if unknown := [name for name in names if name not in targets]:
            raise FlowError(
                f"the route of stage {self.config.name} chose {unknown[0]!r}, which is not in "
                "its next"
            )
        return names


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled pipeline, as the coordinator runs it; `stages` keeps the configured order."""

    config: PipelineConfig
    stages: Mapping[str, StagePlan]
    terminal_merge: Merge

    def entry_for(self, request: OmniRequest) -> str:
        """The first stage of a request: by task and media, by task, or the pipeline's entry."""
        task = str(request.metadata.get("task") or "chat")
        inputs = request.inputs if isinstance(request.inputs, dict) else {}
        media_names = [name for key, name in MEDIA.items() if inputs.get(key)]
        for count in range(len(media_names), -1, -1):
            for media in combinations(media_names, count):
                if stage := self.config.entries.get("+".join((task, *media))):
                    return stage
        return self.config.entry


def compile_plan(config: PipelineConfig) -> Plan:
    """Validate the configuration and import routes and merges (not the stages' factories).

    Raises PipelineConfigError with all problems.
    """
    config = validate_config(config)
    problems: list[str] = []

    def import_or_report(key: str, dotted: str) -> Any:
        try:
            return import_dotted(dotted) if dotted else None
        except (ImportError, AttributeError) as error:
            problems.append(f"{key}: cannot import {dotted}: {error}")
            return None

    stages = {
        stage.name: StagePlan(
            stage,
            import_or_report(f"stages[{index}].route", stage.route),
            import_or_report(f"stages[{index}].merge", stage.merge),
        )
        for index, stage in enumerate(config.stages)
    }
    terminal_merge = import_or_report("terminal_merge", config.terminal_merge)
    if problems:
        raise PipelineConfigError(problems)
    return Plan(config, stages, terminal_merge)


# Dotted names in pipeline files of earlier releases, accepted for one release.
_OLD_MODULES = {
    f"omni_proxy.replica.{old}": f"omni_proxy.replica.{new}"
    for old, new in (
        ("stages." + "speak", "stages.synthesize"),
        ("stages." + "look", "stages.ocr"),
        ("pipeline." + "merge", "pipeline.config"),
        ("text.stage", "stages.text"),
    )
}


def current_name(dotted: str) -> str:
    """The name in this release of what `dotted` named in an earlier one."""
    module, colon, function = dotted.partition(":")
    return f"{_OLD_MODULES.get(module, module)}{colon}{function}"


def import_dotted(dotted: str) -> Callable[..., Any]:
    """Import `package.module:function`; raises ImportError or AttributeError."""
    module, _, function = current_name(dotted).partition(":")
    imported: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return imported


# Merges: they join the results of several stages into one.


def merge_terminals(results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return all results under their stages' names."""
    return dict(results)


def merge_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Join stages whose results have different keys; for a shared key the last one wins."""
    merged: dict[str, Any] = {}
    for result in data.values():
        merged |= result
    return merged
