"""Command-line arguments of `omni-proxy simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from omni_proxy.cli.flags.command_parser import CommandParser, not_negative, positive, whole
from omni_proxy.config.fields import POLICIES
from omni_proxy.simulate.engine import EngineSpec
from omni_proxy.simulate.faults import EXPECTED
from omni_proxy.simulate.workload import WORKLOADS

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
