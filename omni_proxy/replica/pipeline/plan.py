"""A validated pipeline with its functions imported: entry, routes and merges.

Invariant: what a route or a merge returns is checked before anything is sent. The merge functions
of this module: a merge of terminals returns `{stage: result}`, a fan-in one stage's `data`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from omni_proxy.replica.pipeline.config import (
    MEDIA,
    PipelineConfig,
    PipelineConfigError,
    StageConfig,
    validate_config,
)
from omni_proxy.replica.pipeline.messages import OmniRequest, StagePayload

Route = Callable[[StagePayload], Any]
Merge = Callable[[Mapping[str, Any]], Any]


class FlowError(Exception):
    """The pipeline's routing of a request failed; the text names the stage (HTTP: 500)."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage as the coordinator sees it."""

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
    """What the coordinator works from; `stages` keeps the configured order."""

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
        ("pipeline." + "merge", "pipeline.plan"),
    )
}


def import_dotted(dotted: str) -> Callable[..., Any]:
    """Import `package.module:function`; raises ImportError or AttributeError."""
    module, _, function = dotted.partition(":")
    imported: Callable[..., Any] = getattr(
        importlib.import_module(_OLD_MODULES.get(module, module)), function
    )
    return imported


# How the results of several stages become one.
#
# Invariant: a merge of terminals returns `{stage: result}`; a fan-in returns one stage's `data`.


def merge_terminals(results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return all results under their stages' names."""
    return dict(results)


def merge_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Join stages whose results have different keys; for a shared key the last one counts."""
    merged: dict[str, Any] = {}
    for result in data.values():
        merged |= result
    return merged
