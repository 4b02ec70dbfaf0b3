"""The checks of `promtool check metrics` for an exposition, and some of our own."""

from __future__ import annotations

import re
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# Base units only: seconds and bytes.
OTHER_UNITS = {"ms", "us", "millis", "milliseconds", "micros", "kb", "mb", "kib", "mib", "minutes",
    "hours", "percent"}  # fmt: skip
HISTOGRAM_SUFFIXES = ("_count", "_sum", "_bucket")
TYPES = ("gauge", "counter", "histogram", "summary")
# Known labels; the values of each are bounded by the program, the fleet or the configuration.
LABELS = {
    "route", "model", "worker", "status", "end", "cause", "state", "reason", "type", "origin",
    "version", "policy", "branch", "result", "operation", "outcome", "source", "log", "task", "le",
    "door", "process", "rank", "key", "gen_ai_operation_name", "gen_ai_request_model",
}  # fmt: skip


def names(text: str) -> set[str]:
    """Names of metrics as queried: a counter with its _total, a histogram without suffixes."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
    }


def problems(text: str) -> list[str]:
    families = list(text_string_to_metric_families(text))
    found = [
        f"{name}: {word} appears twice"
        for word in ("HELP", "TYPE")
        for name, count in Counter(re.findall(rf"^# {word} (\S+)", text, re.MULTILINE)).items()
        if count > 1
    ]
    found += [f"{f.name}: {problem}" for f in families for problem in _family_problems(f)]
    series = Counter((s.name, *sorted(s.labels.items())) for f in families for s in f.samples)
    found += [f"{key}: twice" for key, count in series.items() if count > 1]
    return found


def _family_problems(family):
    words = family.name.split("_")
    if not NAME.fullmatch(family.name):
        yield "not in snake case"
    if not family.documentation.strip():
        yield "no HELP"
    if family.type not in TYPES:
        yield f"no TYPE: {family.type}"
    if set(words) & OTHER_UNITS:
        yield "not a base unit"
    if set(words) & set(TYPES):
        yield "its type is part of its name"
    if family.name.endswith(("_total", *HISTOGRAM_SUFFIXES)):
        yield "a suffix that is not its own"
    if family.type == "histogram":
        yield from _histogram_problems(family)
    yield from _sample_problems(family)


def _sample_problems(family):
    for sample in family.samples:
        if family.type == "counter" and not sample.name.endswith("_total"):
            yield "a counter without _total"
        if unknown := sample.labels.keys() - LABELS:
            yield f"unknown labels: {unknown}"


def _histogram_problems(family):
    if not family.name.endswith("_seconds"):
        yield "a histogram without its unit"
    series: dict[tuple, list[tuple[float, float]]] = {}
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            labels = {**sample.labels}
            bound = float(labels.pop("le"))
            series.setdefault(tuple(sorted(labels.items())), []).append((bound, sample.value))
    for rows in series.values():
        if rows != sorted(rows) or [v for _, v in rows] != sorted(v for _, v in rows):
            yield "buckets that do not increase"
        if rows[-1][0] != float("inf"):
            yield "no last bucket"
