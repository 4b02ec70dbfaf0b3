"""`omni-proxy explain`: shows where the running proxy would send a request, and why.

Exit status 0: a worker would get it; 1: none would, or the request is refused; 2: no proxy could be
reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import quote

from omni_proxy.cli.client.admin_client import (
    EXIT_NOT_REACHABLE,
    AdminClient,
    AdminClientError,
    JsonObject,
    add_target_arguments,
    admin_target_of,
)
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.cli.terminal_text import NOTHING, printable, render_table, strip_noise
from omni_proxy.routing.routes import DEFAULT_PATH

NO_WORKER: Final = 1
_SHOWN: Final = frozenset(("worker_id", "url", "rank", "reason"))
_EPILOG: Final = """\
examples:
  omni-proxy explain request.json
  echo '{"model": "m", "messages": []}' | omni-proxy explain
  omni-proxy explain request.json --header 'X-Session-Id: 7' --path /v1/completions
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy explain",
        description="Show where the running proxy would send a request, and why. Nothing is sent.",
        epilog=_EPILOG,
    )
    result.add_argument(
        "file", metavar="FILE", nargs="?", default="-", help="the request body; - is stdin"
    )
    result.add_argument(
        "--path", default=DEFAULT_PATH, help=f"the model route (default {DEFAULT_PATH})"
    )
    result.add_argument(
        "--header", metavar="'NAME: VALUE'", action="append", default=[], dest="headers",
        help="a request header, such as a routing hint or a session key; repeatable",
    )  # fmt: skip
    add_target_arguments(result)
    result.add_argument("--json", action="store_true", help="print the proxy's reply unchanged")
    return result


def main(argv: Sequence[str]) -> int:
    arguments_parser = parser()
    arguments = arguments_parser.parse_args(argv)
    headers = {"content-type": "application/json"}
    for header in arguments.headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            arguments_parser.error(f"--header {header!r}: expected NAME: VALUE")
        headers[name.strip().lower()] = value.strip()
    try:
        body = _body(arguments.file)
        with AdminClient(admin_target_of(arguments)) as proxy:
            reply = proxy.post_bytes(f"/explain?path={quote(arguments.path)}", body, headers)
    except AdminClientError as error:
        print(f"omni-proxy explain: {error}", file=sys.stderr)
        return EXIT_NOT_REACHABLE
    explanation = reply.body
    if arguments.json:
        print(json.dumps(explanation, indent=2))
    elif reply.refusal:
        print(f"refused with status {reply.status}: {printable(reply.refusal)}", file=sys.stderr)
    else:
        print("\n".join(render_explanation(explanation)))
    return 0 if explanation.get("pick") else NO_WORKER


def _body(file: str) -> bytes:
    """Raises AdminClientError."""
    if file == "-":
        if sys.stdin.isatty():
            print("the request's body, then Ctrl-D:", file=sys.stderr)
        return sys.stdin.buffer.read()
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except OSError as error:
        raise AdminClientError(f"{file}: {error.strerror}") from None


def render_explanation(body: JsonObject) -> list[str]:
    requirements = body["need"]
    capabilities = ", ".join(requirements["capabilities"]) or "nothing special"
    weights = (
        f"; weights {printable(requirements['weights'])}" if requirements.get("weights") else ""
    )
    model = printable(requirements["model"]) if requirements.get("model") else "any"
    has_roles = any(worker.get("role", "regular") != "regular" for worker in body["workers"])
    rows = [
        (
            _target(worker),
            *([worker["role"]] if has_roles else []),
            "yes" if worker["eligible"] else "no",
            worker["in_flight"],
            worker["health_state"],
            worker.get("weight_version") or NOTHING,
            strip_noise("; ".join(map(str, worker["reasons"]))) or NOTHING,
        )
        for worker in body["workers"]
    ]
    head = ["WORKER", "ELIGIBLE", "BUSY", "HEALTH", "WEIGHTS", "AGAINST IT"]
    if has_roles:
        head.insert(1, "ROLE")
    return [
        f"needs     {printable(capabilities)}; model {model}{weights}",
        *_alias(body),
        f"policy    {printable(body['policy'])}",
        *_verdict(body),
        "",
        *(render_table(head, rows, right_aligned=["BUSY"]) if rows else ["there are no workers"]),
    ]


def _target(row: JsonObject) -> str:
    """The worker's URL, with the data-parallel rank if there is one."""
    return f"{row['url']} rank {row['rank']}" if "rank" in row else str(row["url"])


def _alias(body: JsonObject) -> Iterator[str]:
    """Lines about the requested alias; none if the request names a model."""
    alias = body.get("alias")
    if not alias:
        return
    targets = ", ".join(
        f"{printable(target['model'])} (weight {target['weight']}"
        f"{'' if target['available'] else ', no worker for it'})"
        for target in alias["targets"]
    )
    yield f"alias of  {targets}"
    if alias.get("target"):
        yield f"target    {printable(alias['target'])}: {printable(alias['reason'])}"


def _verdict(body: JsonObject) -> Iterator[str]:
    pick = body.get("pick")
    if not pick:
        refusal = body.get("refusal") or {}
        code = printable(refusal.get("code", ""))
        yield f"no worker {refusal.get('status')} {code}: {printable(refusal.get('message', ''))}"
        return
    yield f"goes to   {printable(_target(pick))}"
    yield from _pick_lines(pick)
    prefill = body.get("prefill")
    if prefill and prefill.get("pick"):
        yield f"prefill   {printable(_target(prefill['pick']))}, by {printable(prefill['policy'])}"
        yield from _pick_lines(prefill["pick"])
    elif prefill:
        yield f"prefill   no worker: {printable(prefill['reason'])}"


def _pick_lines(pick: JsonObject) -> Iterator[str]:
    if pick.get("reason"):
        yield f"because   {printable(pick['reason'])}"
    for name, value in pick.items():
        if name in _SHOWN:
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{worker}: {amount}" for worker, amount in value.items())
        yield f"          {printable(name)}: {printable(value)}"
