"""`omni-proxy bench URL`: its arguments, and the command, which measures a running server from the
client's side.

Exit status 0: done; 1: every request failed; 2: bad arguments, or the server can't be reached; 130:
Ctrl-C, after printing the results so far. Only results go to stdout. Besides the workload this
module sends only GET /v1/models, and the key only to this server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Final

import httpx
import trio
from rich.console import Console

from omni_proxy.cli import EXIT_INTERRUPTED, EXIT_USAGE_ERROR
from omni_proxy.cli.bench.load import LoadGenerator, LoadPlan, PromptTexts
from omni_proxy.cli.bench.measurements import BenchFigures, LoadMeasurements, draw, print_figures
from omni_proxy.cli.client.tls_options import (
    ClientCert,
    ClientCertError,
    add_tls_arguments,
    client_cert_of,
    create_tls_context,
    explain_tls_error,
)
from omni_proxy.cli.flags.command_parser import CommandParser, positive, whole
from omni_proxy.cli.terminal_text import printable, strip_noise
from omni_proxy.shared.origins import MAX_PORT
from omni_proxy.simulate.traces import TraceError, read_route_log, read_trace
from omni_proxy.simulate.workload import RATE_PER_WORKER, WORKLOADS, Workload

CONNECT_SECS = 10.0


class TargetError(Exception):
    """The server can't be measured; the text gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """`base` ends before `/v1`."""

    base: str
    key: str  # "" for none
    client_cert: ClientCert

    def create_client(self) -> httpx.AsyncClient:
        """A client without connection limits; it times out only while connecting. Raises
        ClientCertError."""
        return httpx.AsyncClient(
            verify=create_tls_context(self.client_cert),
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(None, connect=CONNECT_SECS),
            trust_env=False,  # HTTP_PROXY must not apply here
        )


def target_of(url: str, key_env: str | None, client_cert: ClientCert) -> BenchTarget:
    """Raises TargetError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise TargetError(f"{url}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise TargetError(f"{url}: expected http://HOST:PORT or https://HOST:PORT")
    if not 0 < (parsed.port or 1) <= MAX_PORT:
        raise TargetError(f"{url}: expected a port from 1 to {MAX_PORT}")
    if parsed.query or parsed.fragment or parsed.userinfo:
        raise TargetError(f"{url}: expected no user, query or fragment; a key: --api-key-env NAME")
    key = "" if key_env is None else os.environ.get(key_env, "").strip()
    if key_env is not None and not (key and key.isascii() and key.isprintable()):
        raise TargetError(f"--api-key-env {key_env}: this environment variable holds no key")
    base = str(parsed).rstrip("/").removesuffix("/v1")
    return BenchTarget(base, key, client_cert)


async def find_model(client: httpx.AsyncClient, target: BenchTarget, wanted: str | None) -> str:
    """`wanted`, else the first that the server lists. Raises TargetError."""
    url = f"{target.base}/v1/models"
    try:
        response = await client.get(url, timeout=CONNECT_SECS)
    except httpx.HTTPError as error:
        reason = strip_noise(str(error)) or type(error).__name__
        text = explain_tls_error(target.base, reason, target.client_cert)
        raise TargetError(text or f"{target.base} can't be reached: {reason}") from None
    if wanted is not None:
        return wanted
    if response.status_code in (401, 403):
        raise TargetError(f"{url}: status {response.status_code}; give a key: --api-key-env NAME")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise TargetError(
            f"{url}: status {response.status_code} and no list of models; give --model NAME"
        ) from None


ALL_FAILED: Final = 1
TERMINAL_SECS, LINES_SECS = 0.5, 10.0  # between two lines of progress


@dataclass(slots=True)
class _Result:
    model: str = ""
    figures: BenchFigures | None = None
    refused: str | None = None
    interrupted: bool = False


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


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    if wrong := contradiction(arguments):
        parser().error(wrong)
    try:
        target = target_of(arguments.url, arguments.api_key_env, client_cert_of(arguments))
        client = target.create_client()
        workload, requests = _workload(arguments)
    except (TargetError, ClientCertError, TraceError) as error:
        return _refuse(str(error))
    result = trio.run(_run, arguments, target, client, workload, requests)
    if result.refused is not None:
        return _refuse(result.refused)
    if result.figures is None:  # interrupted before the first request
        return EXIT_INTERRUPTED
    status = _show(arguments, target, result, requests)
    if result.interrupted:
        return EXIT_INTERRUPTED
    if not result.figures.completed:
        return ALL_FAILED
    return status


def _refuse(text: str) -> int:
    print(f"omni-proxy bench: {printable(text)}", file=sys.stderr)
    return EXIT_USAGE_ERROR


def _workload(arguments: argparse.Namespace) -> tuple[Workload, int]:
    """The workload and the number of its requests. Raises TraceError."""
    if arguments.trace is not None:
        trace = read_trace(arguments.trace, arguments.requests)
        return trace, len(trace.requests)
    if arguments.route_log is not None:
        log = read_route_log(arguments.route_log, arguments.requests)
        return log, len(log.requests)
    number = arguments.requests or REQUESTS
    workers = (arguments.rate or DEFAULT_RATE) / RATE_PER_WORKER
    make = WORKLOADS[arguments.workload or DEFAULT_WORKLOAD]
    return make(number, workers, Random(f"{arguments.seed} workload")), number


async def _run(
    arguments: argparse.Namespace,
    target: BenchTarget,
    client: httpx.AsyncClient,
    workload: Workload,
    requests: int,
) -> _Result:
    result = _Result()
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery, client:

            async def watch_interrupt() -> None:
                async for _ in signals:
                    result.interrupted = True
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch_interrupt)
            try:
                result.model = await find_model(client, target, arguments.model)
            except TargetError as error:
                result.refused = str(error)
            else:
                print(
                    f"omni-proxy bench: sending {requests} requests to {target.base}; Ctrl-C stops",
                    file=sys.stderr,
                )
                plan = _plan(arguments, workload, result.model)
                measured = LoadMeasurements(trio.current_time())
                nursery.start_soon(_show_progress, measured, requests)
                try:
                    await LoadGenerator(client, target.base, plan, measured).run()
                finally:
                    _end_progress()
                    stopped_at = trio.current_time() if result.interrupted else None
                    result.figures = measured.figures(arguments.deadline_ms, stopped_at)
            nursery.cancel_scope.cancel()
    return result


def _plan(arguments: argparse.Namespace, workload: Workload, model: str) -> LoadPlan:
    timed = arguments.rate or arguments.speed
    bound = arguments.concurrency
    return LoadPlan(
        workload=workload,
        texts=PromptTexts(arguments.seed),
        model=model,
        chat=arguments.endpoint == "chat",
        speed=arguments.speed or 1.0,
        users=None if timed else bound,
        places=bound if timed else None,
        max_tokens=arguments.max_tokens,
        ignore_eos=arguments.ignore_eos,
        timeout_secs=arguments.timeout_secs,
    )


async def _show_progress(measured: LoadMeasurements, requests: int) -> None:
    terminal = sys.stderr.isatty()
    while True:
        await trio.sleep(TERMINAL_SECS if terminal else LINES_SECS)
        text = (
            f"{measured.ended} of {requests} requests ended, {measured.errors.total()} failed, "
            f"{measured.started - measured.ended} in flight"
        )
        shown = f"\r\x1b[K{text}" if terminal else f"{text}\n"
        print(shown, end="", file=sys.stderr, flush=True)


def _end_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _show(
    arguments: argparse.Namespace, target: BenchTarget, result: _Result, requests: int
) -> int:
    figures = result.figures
    assert figures is not None
    recorded = arguments.trace or arguments.route_log
    source = str(recorded or arguments.workload or DEFAULT_WORKLOAD)
    heading = f"{target.base}, model {result.model}, {source}, seed {arguments.seed}"
    if arguments.json:
        head = {
            "url": target.base,
            "model": result.model,
            "source": source,
            "seed": arguments.seed,
            "interrupted": result.interrupted,
            "planned": requests,
        }
        print(json.dumps({**head, **asdict(figures)}, indent=2))
    else:
        if result.interrupted:
            heading += ", interrupted"
        print_figures(Console(highlight=False), heading, figures)
        not_sent = requests - figures.requests - figures.unfinished
        if not_sent and not result.interrupted:
            print(f"{not_sent} not sent: turns of chats in which a request had failed")
    if arguments.plot is not None:
        return _write_plot(arguments.plot, draw(heading, figures))
    return 0


def _write_plot(path: Path, picture: str) -> int:
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        return _refuse(f"--plot {path}: {error.strerror}")
    return 0
