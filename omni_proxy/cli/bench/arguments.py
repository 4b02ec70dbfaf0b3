"""Command-line arguments of `omni-proxy bench`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from omni_proxy.cli.client.tls_options import add_tls_arguments
from omni_proxy.cli.flags.command_parser import CommandParser, positive, whole
from omni_proxy.simulate.workload import RATE_PER_WORKER, WORKLOADS

REQUESTS: Final = 100  # of a generated workload
MAX_REQUESTS: Final = 1_000_000
MAX_CONCURRENCY: Final = 10_000
MAX_RATE: Final = 100_000.0
TIMEOUT_SECS: Final = 600.0
DEFAULT_RATE: Final = RATE_PER_WORKER
DEFAULT_WORKLOAD: Final = "shared"
_EPILOG: Final = """\
examples:
  omni-proxy bench http://127.0.0.1:30000 --rate 4 --requests 200 --deadline-ms 500
  omni-proxy bench http://127.0.0.1:30000 --workload chats --concurrency 16
  omni-proxy bench https://llm.example --trace mooncake-conversation.jsonl.gz --speed 0.5

It sends real requests, which load the server and may cost money. The same --seed gives the same
prompts, so a second run hits the caches of the first: change --seed. Ctrl-C prints the results so
far. Exit status 0: done; 1: every request failed; 2: bad arguments, or no server; 130: Ctrl-C.
docs/bench.md describes what is sent and how it is measured. (`python -m tools.bench`, in the
sources, measures the proxy's own overhead for its developers.)
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy bench",
        description="Measure latency and throughput of a running proxy, or of any "
        "OpenAI-compatible server, from the client's side.",
        epilog=_EPILOG,
    )
    result.add_argument("url", metavar="URL", help="http://HOST:PORT, with or without /v1")
    result.add_argument("--model", metavar="NAME", help="model (default: the first of /v1/models)")
    result.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the API key"
    )
    result.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat",
        help="/v1/chat/completions or /v1/completions (default chat)",
    )  # fmt: skip
    _add_load(result)
    result.add_argument(
        "--deadline-ms", type=positive, metavar="N",
        help="also report goodput: requests whose first token arrives within N ms",
    )  # fmt: skip
    result.add_argument(
        "--timeout-secs", type=positive, default=TIMEOUT_SECS, metavar="N",
        help=f"requests that take longer count as failed (default {TIMEOUT_SECS:g})",
    )  # fmt: skip
    result.add_argument("--json", action="store_true", help="print one JSON object")
    result.add_argument("--plot", type=Path, metavar="FILE", help="also write a chart (SVG)")
    add_tls_arguments(result)
    return result


def _add_load(result: argparse.ArgumentParser) -> None:
    load = result.add_argument_group("load")
    source = load.add_mutually_exclusive_group()
    source.add_argument(
        "--workload", choices=tuple(WORKLOADS), metavar="NAME",
        help=f"{', '.join(WORKLOADS)} (default {DEFAULT_WORKLOAD})",
    )  # fmt: skip
    source.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="replay a trace, Mooncake's .jsonl or Azure's .csv, at its recorded times",
    )  # fmt: skip
    source.add_argument(
        "--route-log", type=Path, metavar="FILE",
        help="replay a route log of omni-proxy at its recorded times, with generated prompts of "
        "the same sizes",
    )  # fmt: skip
    load.add_argument(
        "--requests", type=whole(1, MAX_REQUESTS), metavar="N",
        help=f"number of requests; of a trace the first N (default {REQUESTS}, of a trace all)",
    )  # fmt: skip
    load.add_argument(
        "--rate", type=positive, metavar="N",
        help=f"requests per second of a workload (default {DEFAULT_RATE:g})",
    )  # fmt: skip
    load.add_argument(
        "--speed",
        type=positive,
        metavar="X",
        help="speed of a trace or log: 2 replays it twice as fast (default 1)",
    )
    load.add_argument(
        "--concurrency", type=whole(1, MAX_CONCURRENCY), metavar="N",
        help="with --rate or --speed: at most N requests in flight; without them: N users, each of "
        "which sends its next request when its last one has ended",
    )  # fmt: skip
    load.add_argument(
        "--max-tokens", type=whole(1, 1_000_000), metavar="N",
        help="most tokens of a response (default: set by the workload)",
    )  # fmt: skip
    load.add_argument(
        "--ignore-eos", action="store_true",
        help="generate the full number of tokens, past end-of-sequence tokens (vLLM, SGLang)",
    )  # fmt: skip
    load.add_argument(
        "--seed", type=whole(0, 2**63), default=0, metavar="N", help="random seed (default 0)"
    )


def contradiction(arguments: argparse.Namespace) -> str | None:
    """An error message if flags contradict each other, else None."""
    recorded = arguments.trace is not None or arguments.route_log is not None
    if recorded and arguments.rate is not None:
        return "--rate is for workloads; a trace has its own times, which --speed scales"
    if not recorded and arguments.speed is not None:
        return "--speed is for --trace and --route-log; a workload has --rate"
    if arguments.rate is not None and arguments.rate > MAX_RATE:
        return f"--rate {arguments.rate:g}: expected at most {MAX_RATE:g}"
    return None
