"""`omni-proxy explain`: where the running proxy would send a request, and why; nothing is sent.

Exit status 0: some worker would get it; 1: none would, or the request is refused; 2: nobody could
be asked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import quote

from omni_proxy.cli.client.admin_client import (
    NO_SUCH_PLACE,
    AdminClient,
    AdminClientError,
    JsonObject,
    add_target_arguments,
    admin_target_of,
)
from omni_proxy.cli.screen.text_table import NOTHING, printable, render_table, strip_noise

NOBODY: Final = 1
DEFAULT_PATH: Final = "/v1/chat/completions"
_SHOWN: Final = frozenset(("worker_id", "url", "reason"))
_EPILOG: Final = """\
examples:
  omni-proxy explain request.json
  echo '{"model": "m", "messages": []}' | omni-proxy explain
  omni-proxy explain request.json --header 'X-Session-Id: 7' --path /v1/completions
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="omni-proxy explain",
        description="Where the running proxy would send a request, and why. Nothing is sent.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("file", metavar="FILE", nargs="?", default="-", help="the body; - is stdin")
    made.add_argument(
        "--path", default=DEFAULT_PATH, help=f"the model route (default {DEFAULT_PATH})"
    )
    made.add_argument(
        "--header", metavar="'NAME: VALUE'", action="append", default=[], dest="headers",
        help="of the request; routing hints and keys count",
    )  # fmt: skip
    add_target_arguments(made)
    made.add_argument("--json", action="store_true", help="the proxy's answer as it is")
    return made


def main(argv: Sequence[str]) -> int:
    made = parser()
    arguments = made.parse_args(argv)
    headers = {"content-type": "application/json"}
    for header in arguments.headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            made.error(f"--header {header!r}: expected NAME: VALUE")
        headers[name.strip().lower()] = value.strip()
    try:
        body = _body(arguments.file)
        with AdminClient(admin_target_of(arguments)) as proxy:
            answer = proxy.post_bytes(f"/explain?path={quote(arguments.path)}", body, headers)
    except AdminClientError as why:
        print(f"omni-proxy explain: {why}", file=sys.stderr)
        return NO_SUCH_PLACE
    told = answer.told
    if arguments.json:
        print(json.dumps(told, indent=2))
    elif answer.refusal:
        print(f"refused with status {answer.status}: {printable(answer.refusal)}", file=sys.stderr)
    else:
        print("\n".join(render_explanation(told)))
    return 0 if told.get("pick") else NOBODY


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


def render_explanation(told: JsonObject) -> list[str]:
    need = told["need"]
    wanted = ", ".join(need["capabilities"]) or "nothing special"
    weights = f"; weights {printable(need['weights'])}" if need.get("weights") else ""
    model = printable(need["model"]) if need.get("model") else "any"
    rows = [
        (
            worker["url"],
            "yes" if worker["eligible"] else "no",
            worker["in_flight"],
            worker["health_state"],
            worker.get("weight_version") or NOTHING,
            strip_noise("; ".join(map(str, worker["reasons"]))) or NOTHING,
        )
        for worker in told["workers"]
    ]
    head = ("WORKER", "ELIGIBLE", "BUSY", "HEALTH", "WEIGHTS", "AGAINST IT")
    return [
        f"needs     {printable(wanted)}; model {model}{weights}",
        f"policy    {printable(told['policy'])}",
        *_verdict(told),
        "",
        *(render_table(head, rows, right=["BUSY"]) if rows else ["there are no workers"]),
    ]


def _verdict(told: JsonObject) -> Iterator[str]:
    pick = told.get("pick")
    if not pick:
        refusal = told.get("refusal") or {}
        code = printable(refusal.get("code", ""))
        yield f"nobody    {refusal.get('status')} {code}: {printable(refusal.get('message', ''))}"
        return
    yield f"goes to   {printable(pick['url'])}"
    if pick.get("reason"):
        yield f"because   {printable(pick['reason'])}"
    for name, value in pick.items():
        if name in _SHOWN:
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{worker}: {amount}" for worker, amount in value.items())
        yield f"          {printable(name)}: {printable(value)}"
