"""`omni-proxy simulate`: its arguments, and the command, which compares policies on a workload in
virtual time; nothing is sent.

The proxy's own policy, queue, retry and health objects run over modelled engines, with the settings
of `--config`. Exit status 0: done; 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, Final

import tomli_w

from omni_proxy.cli import EXIT_USAGE_ERROR
from omni_proxy.cli.flags.command_parser import CommandParser, not_negative, positive, whole
from omni_proxy.cli.terminal_text import printable, render_table
from omni_proxy.config.fields import POLICIES
from omni_proxy.config.overlay import SavedState, WorkerSpec, desired_workers
from omni_proxy.config.parse import ConfigError, decode_text, parse, parse_tables
from omni_proxy.config.schema import Config
from omni_proxy.routing.policies.plugins import check_policy
from omni_proxy.simulate.calibrate import CalibrationError, measure
from omni_proxy.simulate.engine import EngineSpec
from omni_proxy.simulate.faults import EXPECTED, Fault, parse_fault
from omni_proxy.simulate.kv_feed import reads_events
from omni_proxy.simulate.report import Run, as_json, notes, summarize, svg, table
from omni_proxy.simulate.simulation import Scenario, Simulation, simulated_worker
from omni_proxy.simulate.traces import TraceError, read_route_log, read_trace
from omni_proxy.simulate.workload import WORKLOADS, Facts, Workload


class _InputError(Exception):
    """Invalid input; the text gives the place, the reason and what is expected."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The runs to simulate. `workload` makes a new workload for each run."""

    runs: list[tuple[str, dict[str, object], Config]]
    workers: list[WorkerSpec]
    workload: Callable[[], Workload]
    spec: EngineSpec
    faults: list[Fault]
    seed: int
    deadline_ms: float | None


WORKERS: Final = 8
REQUESTS: Final = 10_000  # of a generated workload
MAX_REQUESTS: Final = 10_000_000
MAX_WORKERS: Final = 10_000
DEFAULT_ENGINE: Final = EngineSpec()
_EPILOG: Final = """\
examples:
  omni-proxy simulate --trace mooncake-conversation.jsonl.gz --workers 8
  omni-proxy simulate --config proxy.toml --workload chats --policies least_request,cache_aware
  omni-proxy simulate --workload shared --policies cache_aware \\
      --sweep routing.cache_aware.cache_threshold=0.3,0.5,0.8
  omni-proxy simulate --calibrate http://127.0.0.1:8000

A trace is .jsonl (Mooncake) or .csv (TIMESTAMP,ContextTokens,GeneratedTokens), also gzipped.
Equal arguments give equal figures. docs/simulate.md describes what is modelled and what is not.
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy simulate",
        description="Compare policies on a workload, in virtual time. Nothing is sent.",
        epilog=_EPILOG,
    )
    _add_source(result)
    _add_proxy(result)
    _add_engine(result)
    result.add_argument(
        "--fault", action="append", default=[], metavar="SPEC",
        help=f"repeatable: {EXPECTED}; W counts from 0",
    )  # fmt: skip
    result.add_argument(
        "--deadline-ms", type=positive, metavar="N",
        help="also report the requests per second that end within N ms",
    )  # fmt: skip
    result.add_argument("--json", action="store_true", help="print one JSON object")
    result.add_argument("--plot", type=Path, metavar="FILE", help="also write a chart (SVG)")
    return result


def _add_source(result: argparse.ArgumentParser) -> None:
    source = result.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, metavar="FILE", help="use the requests of a trace")
    source.add_argument(
        "--workload", choices=tuple(WORKLOADS), metavar="NAME",
        help=f"generate requests: {', '.join(WORKLOADS)}",
    )  # fmt: skip
    source.add_argument(
        "--route-log",
        type=Path,
        metavar="FILE",
        help="use the requests of a route log of this proxy",
    )
    result.add_argument(
        "--requests", type=whole(1, MAX_REQUESTS), metavar="N",
        help=f"the first N of a trace, or the number to generate (default all, or {REQUESTS})",
    )  # fmt: skip
    result.add_argument(
        "--seed", type=whole(0, 2**63), default=0, metavar="N", help="random seed (default 0)"
    )


def _add_proxy(result: argparse.ArgumentParser) -> None:
    result.add_argument(
        "--config", type=Path, metavar="FILE",
        help="the proxy's configuration, of which [routing], [server] and [health] are used",
    )  # fmt: skip
    result.add_argument(
        "--policies", metavar="A,B",
        help=f"policies to compare (default: the one of --config, else {', '.join(POLICIES)})",
    )  # fmt: skip
    result.add_argument(
        "--workers", type=whole(1, MAX_WORKERS), metavar="N",
        help=f"number of workers (default: those of --config, else {WORKERS})",
    )  # fmt: skip
    result.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=A,B",
        help="repeatable: compare values of a configuration key, such as "
        "routing.cache_aware.cache_threshold",
    )  # fmt: skip


def _add_engine(result: argparse.ArgumentParser) -> None:
    engine = result.add_argument_group("engines")
    for name, kind, default, text in (
        ("prefill-tokens-per-sec", positive, DEFAULT_ENGINE.prefill_tokens_per_sec, "prompt speed"),
        (
            "prefill-overhead-ms", not_negative, DEFAULT_ENGINE.prefill_overhead_ms,
            "fixed time per prompt, in addition to that of its tokens",
        ),
        ("decode-step-ms", not_negative, DEFAULT_ENGINE.decode_step_ms, "time of a decode step"),
        (
            "decode-step-ms-per-request", not_negative, DEFAULT_ENGINE.decode_step_ms_per_request,
            "added to a step by each request of the batch",
        ),
    ):  # fmt: skip
        engine.add_argument(
            f"--{name}", type=kind, metavar="X", help=f"{text} (default {default:g})"
        )
    engine.add_argument(
        "--max-batch", type=whole(1, 1_000_000), metavar="N",
        help=f"most requests in a worker's batch (default {DEFAULT_ENGINE.max_batch})",
    )  # fmt: skip
    engine.add_argument(
        "--kv-tokens", type=whole(0, 2**53), metavar="N",
        help=f"KV memory of a worker; 0: no bound (default {DEFAULT_ENGINE.kv_tokens})",
    )  # fmt: skip
    engine.add_argument(
        "--slots", type=whole(0, 100_000), metavar="N",
        help="cache one text in each of N slots, as llama.cpp does; 0: cache blocks, as vLLM and "
        "SGLang do (default 0)",
    )  # fmt: skip
    engine.add_argument(
        "--calibrate", metavar="URL",
        help="measure a running worker and use its speed; without a workload: print it as flags",
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    if not (arguments.trace or arguments.workload or arguments.route_log or arguments.calibrate):
        parser().error("one of --trace, --workload, --route-log or --calibrate is needed")
    try:
        spec = _engine_spec(arguments)
        if not (arguments.trace or arguments.workload or arguments.route_log):
            print(_as_flags(spec))
            return 0
        plan = _plan(arguments, spec)
        if arguments.plot is not None:
            _check_plot(arguments.plot)
        began_at = monotonic()
        facts, runs = _run(plan)
        wall_secs = monotonic() - began_at
        if arguments.plot is not None:
            _write_plot(arguments.plot, facts, len(plan.workers), runs)
    except (_InputError, TraceError, CalibrationError) as error:
        print(f"omni-proxy simulate: {printable(error)}", file=sys.stderr)
        return EXIT_USAGE_ERROR
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE_ERROR
    if arguments.json:
        result = as_json(plan.seed, len(plan.workers), facts, runs)
        print(json.dumps({**result, "wall_secs": round(wall_secs, 3)}, indent=2))
        return 0
    print("\n".join(_heading(facts, len(plan.workers), wall_secs)))
    head, rows = table(runs)
    print("\n".join(render_table(head, rows, right_aligned=head[1:])))
    if about := notes(runs):
        print("\n" + "\n".join(map(printable, about)))
    return 0


def _plan(arguments: argparse.Namespace, spec: EngineSpec) -> _Plan:
    """Raises _InputError, TraceError, ConfigError."""
    tables, file = _tables(arguments.config)
    config = _parsed(tables, file)
    policies = _policies(arguments, config)
    sweeps = [_sweep(text) for text in arguments.sweep]
    keys = [key for key, _ in sweeps]
    for key in keys:
        if keys.count(key) > 1:
            raise _InputError(f"--sweep {key}: is given twice; write all its values in one")
    runs = []
    for policy in policies:
        for values in product(*(choices for _, choices in sweeps)):
            settings = dict(zip((key for key, _ in sweeps), values, strict=True))
            runs.append((policy, settings, _with(tables, file, policy, settings)))
    workers = _workers(arguments, config)
    faults = [_fault(text, len(workers)) for text in arguments.fault]
    if any(fault.kind == "lose_events" for fault in faults) and not any(
        reads_events(simulated.routing) for _, _, simulated in runs
    ):
        raise _InputError(
            "--fault lose_events has no effect: no run reads KV events; "
            'it needs cache_aware with [routing.cache_aware] source = "events"'
        )
    workload = _workload(arguments, len(workers))
    return _Plan(runs, workers, workload, spec, faults, arguments.seed, arguments.deadline_ms)


def _run(plan: _Plan) -> tuple[Facts, list[Run]]:
    results: list[Run] = []
    facts: Facts | None = None
    for number, (policy, settings, config) in enumerate(plan.runs, 1):
        _progress(f"{number} of {len(plan.runs)}: {policy}")
        scenario = Scenario(plan.workers, plan.workload(), plan.spec, plan.faults, plan.seed)
        simulation = Simulation(config, scenario)
        simulation.run()
        facts = facts or simulation.facts.facts()
        results.append(summarize(policy, settings, simulation, plan.deadline_ms))
    _progress("")
    assert facts is not None
    return facts, results


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _heading(facts: Facts, workers: int, wall_secs: float) -> list[str]:
    return [
        f"{facts.requests} requests in {facts.duration_secs:.0f} s, mean "
        f"{facts.mean_input_tokens:.0f} tokens in and {facts.mean_output_tokens:.0f} out; "
        f"{workers} workers",
        f"best possible hit rate {facts.best_possible_hit_rate * 100:.1f} %, of tokens "
        f"{facts.best_possible_token_rate * 100:.1f} %: one worker with an unbounded cache",
        f"times in ms; simulated in {wall_secs:.1f} s",
        "",
    ]


def _check_plot(path: Path) -> None:
    """Check, before minutes of simulation, that the file can be written. Raises _InputError."""
    if path.is_dir():
        raise _InputError(f"--plot {path}: is a directory, expected the name of a file")
    if not path.parent.is_dir():
        raise _InputError(f"--plot {path}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _InputError(f"--plot {path}: can't be written")


def _write_plot(path: Path, facts: Facts, workers: int, runs: Sequence[Run]) -> None:
    """Raises _InputError."""
    note = (
        f"{facts.requests} requests, {workers} workers; best possible hit rate "
        f"{facts.best_possible_hit_rate * 100:.1f} %"
    )
    try:
        path.write_text(svg("Policies in simulation", note, runs), encoding="utf-8")
    except OSError as error:
        raise _InputError(f"--plot {path}: {error.strerror}") from None


def _engine_spec(arguments: argparse.Namespace) -> EngineSpec:
    """Values of the flags, else measured values, else the defaults. Raises CalibrationError."""
    base = DEFAULT_ENGINE
    if arguments.calibrate:
        base = measure(arguments.calibrate, _progress)
        _progress("")
    from_flags = {
        name: value
        for name in EngineSpec.__slots__
        if (value := getattr(arguments, name)) is not None
    }
    return EngineSpec(**({name: getattr(base, name) for name in EngineSpec.__slots__} | from_flags))


def _as_flags(spec: EngineSpec) -> str:
    return " ".join(
        (
            f"--prefill-tokens-per-sec {spec.prefill_tokens_per_sec:.1f}",
            f"--prefill-overhead-ms {spec.prefill_overhead_ms:.1f}",
            f"--decode-step-ms {spec.decode_step_ms:.3f}",
            f"--decode-step-ms-per-request {spec.decode_step_ms_per_request:.3f}",
            f"--max-batch {spec.max_batch}",
            *((f"--slots {spec.slots}",) if spec.slots else ()),
        )
    )


def _tables(path: Path | None) -> tuple[dict[str, Any], str]:
    """Raises _InputError, ConfigError."""
    if path is None:
        return {}, "defaults"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _InputError(f"--config {path}: {error.strerror}") from None
    parse(raw, str(path))
    return parse_tables(decode_text(raw, str(path)), str(path)), str(path)


def _parsed(tables: Mapping[str, Any], file: str) -> Config:
    """Raises ConfigError."""
    config = parse(tomli_w.dumps(tables), file)
    check_policy(config, file)
    return config


def _with(
    tables: Mapping[str, Any], file: str, policy: str, settings: Mapping[str, object]
) -> Config:
    """The configuration with another policy and swept values. Raises _InputError, ConfigError."""
    changed: dict[str, Any] = deepcopy(dict(tables))
    for key, value in {"routing.policy": policy, **settings}.items():
        *path, last = key.split(".")
        table = changed
        for name in path:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise _InputError(f"--sweep {key}: {name} is not a table of the configuration")
        table[last] = value
    return _parsed(changed, f"{file} with {'--sweep' if settings else f'policy {policy}'}")


def _policies(arguments: argparse.Namespace, config: Config) -> list[str]:
    """Raises _InputError."""
    if arguments.policies is None:
        return [config.routing.policy] if arguments.config is not None else list(POLICIES)
    policies = [name.strip() for name in arguments.policies.split(",") if name.strip()]
    if not policies:
        raise _InputError("--policies: expected at least one name")
    return policies


def _sweep(text: str) -> tuple[str, list[object]]:
    """Raises _InputError."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise _InputError(f"--sweep {text}: expected KEY=A,B")
    if key.strip() == "routing.policy":
        raise _InputError("--sweep routing.policy: policies are compared with --policies A,B")
    return key.strip(), [_value(value.strip()) for value in values.split(",")]


def _value(text: str) -> object:
    """A TOML value; a word without quotes is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _workers(arguments: argparse.Namespace, config: Config) -> list[WorkerSpec]:
    """Raises _InputError."""
    configured = list(desired_workers(config, (), SavedState()))
    for worker in configured:
        if worker.role not in ("", "regular") or worker.ranks != 1:
            raise _InputError(
                f"{worker.url}: roles and ranks of workers are not simulated; give --workers N"
            )
    if arguments.workers is None:
        return configured or [simulated_worker(place) for place in range(WORKERS)]
    return [simulated_worker(place) for place in range(arguments.workers)]


def _fault(text: str, workers: int) -> Fault:
    """Raises _InputError."""
    try:
        fault = parse_fault(text)
    except ValueError as error:
        raise _InputError(f"--fault {text}: {error}") from None
    if fault.worker >= workers:
        raise _InputError(f"--fault {text}: there are workers 0 to {workers - 1}")
    return fault


def _workload(arguments: argparse.Namespace, workers: int) -> Callable[[], Workload]:
    """Raises TraceError."""
    if arguments.workload:
        make, number = WORKLOADS[arguments.workload], arguments.requests or REQUESTS
        return lambda: make(number, workers, Random(f"{arguments.seed} workload"))
    if arguments.trace:
        workload = read_trace(arguments.trace, arguments.requests)
    else:
        workload = read_route_log(arguments.route_log, arguments.requests)
    return lambda: workload
