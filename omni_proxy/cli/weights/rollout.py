"""`omni-proxy weights rollout`: starts, follows, pauses, resumes or cancels a rolling update.

Invariant: following changes nothing, and Ctrl-C stops only the display: the rollout continues. Exit
status 0: done, or it succeeded; 1: the proxy refused it, or it failed or was cancelled; 2: the
proxy can't be reached.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from omni_proxy.cli.client.admin_client import (
    AdminClient,
    AdminClientError,
    AdminReply,
    AdminTarget,
)
from omni_proxy.cli.client.worker_changes import ChangeRefused
from omni_proxy.cli.screen.diagnosis import has_ended, progress_line, rollout_lines
from omni_proxy.weight_sync.rollout.request import KEYS

PATH: Final = "/weights/rollout"
FOLLOW: Final = f"{PATH}?follow=true"
ACTIONS: Final = ("status", "pause", "resume", "cancel")
SILENCE_SECS: Final = 40.0  # the proxy sends a comment after 15 s
UNREACHABLE_SECS: Final = 60.0  # a proxy may restart during the rollout
RETRY_SECS: Final = 0.5
_DATA: Final = "data:"


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=ACTIONS,
        help="pause, resume or cancel the running rollout; status, the default, shows it",
    )  # fmt: skip
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--model-path", metavar="PATH", help="start a rollout from a path that workers read"
    )
    source.add_argument(
        "--version",
        metavar="VERSION",
        help="start a rollout of a stored version, by label or number",
    )
    parser.add_argument("--weight-version", metavar="LABEL", help="the label of the new weights")
    parser.add_argument(
        "--max-unavailable",
        metavar="N",
        help='workers out of rotation at a time, or "25%%" (default 1)',
    )
    parser.add_argument(
        "--canary", metavar="N", type=int, help="workers that must succeed first (default 1)"
    )
    parser.add_argument(
        "--pause-after-canary",
        action="store_true",
        help="wait for `resume` after the canary workers",
    )
    parser.add_argument(
        "--drain-secs", metavar="SECS", type=float,
        help="time for requests in flight to end (default: the configured time; 0: no limit)",
    )  # fmt: skip
    parser.add_argument("--load-format", metavar="FORMAT", help="load format of the files")
    parser.add_argument(
        "--selector", metavar="TERMS", help="start a rollout on only these workers, as in model=m"
    )
    parser.add_argument(
        "--follow", "-f", action="store_true", help="show each step until the rollout has ended"
    )


def run_rollout(target: AdminTarget, arguments: argparse.Namespace, wait_secs: float) -> int:
    """The exit status. Raises AdminClientError, ChangeRefused."""
    with AdminClient(target, wait_secs) as proxy:
        rollout = _ask(proxy, arguments)
    if arguments.follow and not has_ended(rollout):
        rollout = _follow(target, as_json=arguments.json)
    if arguments.json:
        print(json.dumps(rollout, indent=2))
    else:
        print("\n".join(rollout_lines(rollout)))
    wanted = ("cancelled", "rolling_back") if arguments.action == "cancel" else ()
    undone = rollout.get("state") in ("failed", "cancelled", "rolling_back")
    return 1 if undone and rollout.get("state") not in wanted else 0


def _ask(proxy: AdminClient, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rollout from the proxy's reply. Raises AdminClientError, ChangeRefused."""
    flags = {key: getattr(arguments, key) for key in KEYS}
    body = {key: value for key, value in flags.items() if value is not None and value is not False}
    begins = "model_path" in body or "version" in body
    action = arguments.action or "status"
    if begins and arguments.action is not None:
        raise AdminClientError(f"{action} takes neither --model-path nor --version")
    if body and not begins:
        raise AdminClientError("nothing to roll out: pass --model-path PATH or --version VERSION")
    if begins:
        for key in ("version", "max_unavailable"):
            body |= {key: _number(body[key])} if key in body else {}
        query = {"selector": arguments.selector} if arguments.selector else None
        return _rollout_in(proxy.send("POST", PATH, body, query))
    if action == "status":
        return _rollout_in(proxy.get(PATH))
    return _rollout_in(proxy.send("POST", f"{PATH}/{action}", {}))


def _rollout_in(reply: AdminReply) -> dict[str, Any]:
    if reply.refusal:
        raise ChangeRefused(reply.refusal)
    rollout = reply.body.get("rollout", reply.body)
    return rollout if isinstance(rollout, dict) else {}


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


def _follow(target: AdminTarget, *, as_json: bool) -> dict[str, Any]:
    """Show each step on stderr until it has ended. Raises AdminClientError."""
    last = ""
    for rollout in _events(target):
        line = progress_line(rollout)
        if line != last and not as_json and not has_ended(rollout):
            print(line, file=sys.stderr, flush=True)
        last = line
        if has_ended(rollout):
            return rollout
    raise AdminClientError("the proxy ended the stream before the rollout had ended")


def _events(target: AdminTarget) -> Iterator[dict[str, Any]]:
    """The rollout at each change; waits for a proxy that restarts. Raises AdminClientError."""
    last_read_at = time.monotonic()
    while True:
        try:
            with AdminClient(target, SILENCE_SECS) as proxy, proxy.lines(FOLLOW) as lines:
                for line in lines:
                    last_read_at = time.monotonic()
                    if line.startswith(_DATA):
                        yield json.loads(line.removeprefix(_DATA))
        except AdminClientError:
            if time.monotonic() - last_read_at > UNREACHABLE_SECS:
                raise
        threading.Event().wait(RETRY_SECS)
