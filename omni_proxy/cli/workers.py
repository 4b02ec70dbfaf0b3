"""`omni-proxy workers ...`: who is in the fleet, and changes of it, over the HTTP interface.

Exit status 0: done; 1: the proxy said no, or no such worker; 2: nobody could be asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from omni_proxy.cli.client.admin_client import (
    NO_SUCH_PLACE,
    AdminClient,
    AdminClientError,
    JsonObject,
    add_target_arguments,
    admin_target_of,
    normalize_admin_url,
    with_default_command,
)
from omni_proxy.cli.client.worker_changes import (
    ChangeRefused,
    change_worker,
    fetch_workers,
    find_worker,
    require_accepted,
    worker_path,
)
from omni_proxy.cli.flags.peer_flags import CommandParser
from omni_proxy.cli.screen.diagnosis import GO_ON
from omni_proxy.cli.screen.text_table import (
    NOTHING,
    format_age,
    parse_time,
    printable,
    render_table,
    strip_noise,
)
from omni_proxy.config.schema import CAPABILITIES

REFUSED: Final = 1
# An answer may wait for a weight update, for a probe, or for the end of a drain.
ANSWER_SECS: Final = 600.0
INTERRUPTED: Final = 130
POLL_SECS: Final = 0.3
_PAUSE: Final = threading.Event()  # never set: a pause that Ctrl-C ends at once
_HEAD: Final = ("WORKER", "MODEL", "BUSY", "ROUTED", "FAILED", "WEIGHTS", "ORIGIN", "STATE")
_DONE: Final = {
    "remove": "removed", "disable": "disabled", "enable": "enabled", "revive": "revived",
}  # fmt: skip
COMMANDS: Final = {
    "list": "the fleet as a table (the default)",
    "add": "add workers; each is probed once",
    "remove": "take workers away; they finish what they have",
    "disable": "give workers no new request",
    "enable": "give them requests again",
    "drain": "give workers no new request, and let what they have end",
    "revive": "forget their failures and probe them now",
}
_EPILOG: Final = """\
A worker is named by its URL, by HOST:PORT, or by any part of these that only one has.

examples:
  omni-proxy workers
  omni-proxy workers add http://10.0.0.7:8000 --model qwen3-omni
  omni-proxy workers drain 10.0.0.7:8000 --wait && omni-proxy workers remove 10.0.0.7:8000
"""


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="omni-proxy workers",
        description="Look at the workers of a running proxy, and change them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_target_arguments(one)
        one.add_argument("--json", action="store_true", help="the proxy's answers as they are")
        if name == "list":
            one.add_argument("--model", metavar="NAME", help="only those of this model")
            continue
        one.add_argument("workers", metavar="URL" if name == "add" else "WORKER", nargs="+")
        _add_own(one, name)
    return made


def _add_own(one: argparse.ArgumentParser, name: str) -> None:
    if name == "add":
        one.add_argument("--model", metavar="NAME", help="the model that they serve")
        one.add_argument(
            "--capabilities", metavar="NAMES", help=f"of {','.join(CAPABILITIES)}; default all"
        )
    if name == "remove":
        one.add_argument("--drain", action="store_true", help="wait until they have nothing left")
    if name == "drain":
        one.add_argument("--wait", action="store_true", help="until they have nothing left")
    if name in ("remove", "drain"):
        one.add_argument(
            "--timeout-secs", metavar="SECS", type=float,
            help="for what is in flight; 0: no limit (default [server] drain_timeout_secs)",
        )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(with_default_command(argv, "list"))
    try:
        with AdminClient(admin_target_of(arguments), ANSWER_SECS) as proxy:
            return _run(proxy, arguments)
    except AdminClientError as why:
        print(f"omni-proxy workers: {why}", file=sys.stderr)
        return NO_SUCH_PLACE
    except ChangeRefused as why:
        print(f"omni-proxy workers: {why}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("not waited for any longer; what was asked for goes on", file=sys.stderr)
        return INTERRUPTED


def _run(proxy: AdminClient, arguments: argparse.Namespace) -> int:
    if arguments.command == "list":
        told = fetch_workers(proxy, arguments.model)
        print(json.dumps(told, indent=2) if arguments.json else "\n".join(render_workers(told)))
        return 0
    status = 0
    for named in arguments.workers:
        try:
            status = max(status, _one(proxy, arguments, named))
        except ChangeRefused as why:
            print(f"omni-proxy workers: {why}", file=sys.stderr)
            status = REFUSED
    return status


def _one(proxy: AdminClient, arguments: argparse.Namespace, named: str) -> int:
    if arguments.command == "add":
        return _tell(_added(proxy, arguments, named), "added", arguments)
    record = find_worker(fetch_workers(proxy), named)
    name = arguments.command
    asked = "remove, drained" if name == "remove" and arguments.drain else name
    told = change_worker(proxy, asked, record["id"], getattr(arguments, "timeout_secs", None))
    if name == "drain":
        return _drained(proxy, record, arguments, told)
    return _tell({"worker": record} | told, _DONE[name], arguments)


def _added(proxy: AdminClient, arguments: argparse.Namespace, url: str) -> JsonObject:
    body: dict[str, object] = {"url": normalize_admin_url(url)}
    if arguments.model is not None:
        body["model"] = arguments.model
    if arguments.capabilities is not None:
        names = arguments.capabilities.replace(",", " ").split()
        body["capabilities"] = names
    return require_accepted(proxy.send("POST", "/workers", body)).told


def _tell(told: JsonObject, done: str, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps(told, indent=2))
        return 0
    record = told["worker"]
    overdue = told.get("drained") is False
    if done == "removed":
        state = "requests were still in flight at the deadline" if overdue else ""
        if told.get("process") == "stops":
            ends = "its process stops, `workers add` starts it again"
            state = f"{state}; {ends}" if state else ends
    else:
        state = describe_state(record)
    print(f"{done} {printable(record['url'])}" + (f": {state}" if state else ""))
    return REFUSED if overdue else 0


def _drained(
    proxy: AdminClient, record: JsonObject, arguments: argparse.Namespace, told: JsonObject
) -> int:
    """Says how far it is, and with --wait until it is over."""
    record = told.get("worker") or record
    said = ""
    while arguments.wait and (draining := record.get("draining") or {}):
        if draining.get("state") != "draining":
            break
        if (now := describe_state(record)) != said and not arguments.json:
            print(f"{printable(record['url'])}: {now}", file=sys.stderr, flush=True)
            said = now
        _PAUSE.wait(POLL_SECS)
        record = require_accepted(proxy.get(worker_path(record["id"]))).told
    if arguments.json:
        print(json.dumps(record, indent=2))
    else:
        print(f"{printable(record['url'])}: {describe_state(record)}")
    overdue = (record.get("draining") or {}).get("state") == "overdue"
    return REFUSED if overdue else 0


def render_workers(fleet: Sequence[JsonObject]) -> list[str]:
    if not fleet:
        return ["no workers: omni-proxy workers add URL, or name them in the file"]
    rows = [
        (
            record["url"],
            record.get("model") or "any",
            record.get("in_flight", 0),
            record.get("routed_requests", 0),
            record.get("failed_requests", 0),
            record.get("weight_version") or NOTHING,
            record.get("origin") or NOTHING,
            describe_state(record),
        )
        for record in fleet
    ]
    return render_table(_HEAD, rows, right=["BUSY", "ROUTED", "FAILED"])


def describe_state(record: JsonObject) -> str:
    """Of a record of GET /workers: whether it takes requests, and if not why."""
    if draining := record.get("draining"):
        in_flight = draining.get("in_flight", 0)
        deadline = parse_time(draining.get("deadline"))
        left = (deadline - datetime.now(UTC)).total_seconds() if deadline else 0.0
        until = (
            f", {format_age(left)} left" if left > 0 and draining.get("state") == "draining" else ""
        )
        return f"{printable(draining.get('state'))}, {in_flight} in flight{until}"
    health = printable(record.get("health_state"))
    if record.get("disabled"):
        return f"disabled, {health}"
    if record.get("paused") and record.get("routable"):
        return f"PAUSED, {health}: {GO_ON}"
    if record.get("why") and not record.get("trial"):
        return printable(strip_noise(str(record["why"])))
    if record.get("held_by"):
        return f"held by {printable(', '.join(map(str, record['held_by'])))}, {health}"
    if record.get("trial"):
        return "on trial"
    why = record.get("last_error")
    return (
        f"{health}: {printable(strip_noise(str(why)))}" if why and health != "healthy" else health
    )
