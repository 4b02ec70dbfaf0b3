"""What `promtool check metrics` would say of an exposition, and a little more."""

from __future__ import annotations

import re
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# Base units only: seconds and bytes.
OTHER_UNITS = {"ms", "us", "millis", "milliseconds", "micros", "kb", "mb", "kib", "mib", "minutes",
    "hours", "percent"}  # fmt: skip
OF_HISTOGRAMS = ("_count", "_sum", "_bucket")
TYPES = ("gauge", "counter", "histogram", "summary")
# Each is bounded by a table of the program, by the fleet or by its configuration.
LABELS = {
    "route", "model", "worker", "status", "end", "cause", "state", "reason", "type", "origin",
    "version", "policy", "branch", "result", "operation", "outcome", "source", "log", "task", "le",
    "door", "process", "rank", "key", "gen_ai_operation_name", "gen_ai_request_model",
}  # fmt: skip


def names(text: str) -> set[str]:
    """As they are queried: a counter with its _total, a histogram without its suffixes."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
    }


def problems(text: str) -> list[str]:
    families = list(text_string_to_metric_families(text))
    found = [
        f"{name}: {word} stands there twice"
        for word in ("HELP", "TYPE")
        for name, count in Counter(re.findall(rf"^# {word} (\S+)", text, re.MULTILINE)).items()
        if count > 1
    ]
    found += [f"{f.name}: {why}" for f in families for why in _of_family(f)]
    series = Counter((s.name, *sorted(s.labels.items())) for f in families for s in f.samples)
    found += [f"{key}: twice" for key, count in series.items() if count > 1]
    return found


def _of_family(family):
    words = family.name.split("_")
    if not NAME.fullmatch(family.name):
        yield "not in snake case"
    if not family.documentation.strip():
        yield "no HELP"
    if family.type not in TYPES:
        yield f"no TYPE: {family.type}"
    if set(words) & OTHER_UNITS:
        yield "a unit that is no base unit"
    if set(words) & set(TYPES):
        yield "its type is part of its name"
    if family.name.endswith(("_total", *OF_HISTOGRAMS)):
        yield "a suffix that is not its own"
    if family.type == "histogram":
        yield from _of_histogram(family)
    yield from _of_samples(family)


def _of_samples(family):
    for sample in family.samples:
        if family.type == "counter" and not sample.name.endswith("_total"):
            yield "a counter without _total"
        if strange := sample.labels.keys() - LABELS:
            yield f"labels that nobody vouches for: {strange}"


def _of_histogram(family):
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
            yield "buckets that don't rise"
        if rows[-1][0] != float("inf"):
            yield "no last bucket"
