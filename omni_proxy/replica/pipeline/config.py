"""The configuration of a pipeline: stages, their order, and the process of each one.

Invariant: a pipeline that passed `validate_config` has no unknown stage name, no cycle and no dead
end. No stage is imported here: dotted names are only parsed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

MERGE_TERMINALS = "omni_proxy.replica.pipeline.plan:merge_terminals"
# Media that a request may have beside its text, by the key in its inputs. A task in `entries` may
# be followed by some of them (`chat+audio+image`): that entry is for requests that have all of
# them.
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
        """Every stage that may follow this one, without duplicates."""
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
        yield "env: only a stage with a process has an environment of its own"
    yield from _flow_problems(stage, by_name)


def _flow_problems(stage: StageConfig, by_name: Mapping[str, StageConfig]) -> Iterator[str]:
    if not stage.terminal and not stage.targets:
        yield "next: the stage is not terminal and leads nowhere"
    if stage.route and not stage.targets:
        yield "route: there is no next to choose from"
    if bool(stage.wait_for) != bool(stage.merge):
        yield "wait_for: needs merge beside it, and merge needs wait_for"
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
                    "sets it otherwise"
                )
