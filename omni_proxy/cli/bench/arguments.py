"""The arguments of `omni-proxy bench`, checked one by one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from omni_proxy.cli.client.tls_options import add_tls_arguments
from omni_proxy.cli.flags.command_parser import CommandParser, positive, whole
from omni_proxy.simulate.workload import RATE_PER_WORKER, WORKLOADS

REQUESTS: Final = 100  # of a made workload
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

It sends real requests, which load the server and may cost money. Equal --seed: equal prompts, so a
second run finds the caches of the first; give another --seed. Ctrl-C prints what is known so far.
Exit status 0: done; 1: every request failed; 2: bad arguments, or no server; 130: Ctrl-C.
docs/bench.md says what is sent and how it is measured. (`python -m tools.bench`, in the sources,
measures the proxy's own cost for its developers.)
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy bench",
        description="Measure a running fleet (any OpenAI-compatible server) as its users see it.",
        epilog=_EPILOG,
    )
    result.add_argument("url", metavar="URL", help="http://HOST:PORT, with or without /v1")
    result.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    result.add_argument(
        "--api-key-env", metavar="NAME", help="the environment variable with the key"
    )
    result.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat",
        help="/v1/chat/completions or /v1/completions (default chat)",
    )  # fmt: skip
    _add_load(result)
    result.add_argument(
        "--deadline-ms", type=positive, metavar="N",
        help="goodput: requests whose first token comes within it",
    )  # fmt: skip
    result.add_argument(
        "--timeout-secs", type=positive, default=TIMEOUT_SECS, metavar="N",
        help=f"a request that takes longer has failed (default {TIMEOUT_SECS:g})",
    )  # fmt: skip
    result.add_argument("--json", action="store_true", help="print one JSON object")
    result.add_argument("--plot", type=Path, metavar="FILE", help="also write a picture (SVG)")
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
        help="requests of a trace, Mooncake's .jsonl or Azure's .csv, at their times",
    )  # fmt: skip
    source.add_argument(
        "--route-log", type=Path, metavar="FILE",
        help="requests of a route log of omni-proxy, at their times; as large, of other text",
    )  # fmt: skip
    load.add_argument(
        "--requests", type=whole(1, MAX_REQUESTS), metavar="N",
        help=f"how many, or the first N of a trace (default {REQUESTS}, or all)",
    )  # fmt: skip
    load.add_argument(
        "--rate", type=positive, metavar="N",
        help=f"requests per second of a workload (default {DEFAULT_RATE:g})",
    )  # fmt: skip
    load.add_argument(
        "--speed",
        type=positive,
        metavar="X",
        help="of a trace or a log: 2 halves its times (default 1)",
    )
    load.add_argument(
        "--concurrency", type=whole(1, MAX_CONCURRENCY), metavar="N",
        help="with --rate or --speed: at most N requests in flight; alone: N users, each of which "
        "sends as soon as its last request has ended",
    )  # fmt: skip
    load.add_argument(
        "--max-tokens", type=whole(1, 1_000_000), metavar="N",
        help="of an answer, at most (default: what the workload says)",
    )  # fmt: skip
    load.add_argument(
        "--ignore-eos", action="store_true",
        help="answers have all the tokens that were asked for (vLLM, SGLang)",
    )  # fmt: skip
    load.add_argument(
        "--seed", type=whole(0, 2**63), default=0, metavar="N", help="of all chance (default 0)"
    )


def contradiction(arguments: argparse.Namespace) -> str | None:
    """Flags that do not go together, in words."""
    recorded = arguments.trace is not None or arguments.route_log is not None
    if recorded and arguments.rate is not None:
        return "--rate is for workloads; a trace has its own times, which --speed scales"
    if not recorded and arguments.speed is not None:
        return "--speed is for --trace and --route-log; a workload has --rate"
    if arguments.rate is not None and arguments.rate > MAX_RATE:
        return f"--rate {arguments.rate:g}: expected at most {MAX_RATE:g}"
    return None
