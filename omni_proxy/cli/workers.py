"""`omni-proxy workers ...`: lists and changes the workers of a running proxy over its admin API.

Exit status 0: done; 1: the proxy refused, or no such worker; 2: no proxy could be reached.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, get_args

from omni_proxy.cli import EXIT_INTERRUPTED
from omni_proxy.cli.client.admin_client import (
    EXIT_NOT_REACHABLE,
    AdminClient,
    AdminClientError,
    JsonObject,
    add_target_arguments,
    admin_target_of,
    normalize_admin_url,
    with_default_command,
)
from omni_proxy.cli.client.worker_changes import (
    EXIT_REFUSED,
    ChangeRefused,
    WorkerAction,
    change_worker,
    fetch_workers,
    find_worker,
    require_accepted,
    worker_path,
)
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.cli.screen.diagnosis import RESUME_COMMAND
from omni_proxy.cli.terminal_text import (
    NOTHING,
    format_age,
    parse_time,
    printable,
    render_table,
    strip_noise,
)
from omni_proxy.config.fields import CAPABILITIES, Role
from omni_proxy.shared.engine_protocol import KvConnector

# A reply may wait for a weight update, for a probe, or for the end of a drain.
ANSWER_SECS: Final = 600.0
POLL_SECS: Final = 0.3
NOT_HEALTHY: Final = "worker_not_healthy"
_PAUSE: Final = threading.Event()  # never set: Ctrl-C interrupts this wait
_HEAD: Final = ("WORKER", "MODEL", "BUSY", "ROUTED", "FAILED", "WEIGHTS", "ORIGIN", "STATE")
_DONE: Final = {
    WorkerAction.REMOVE: "removed", WorkerAction.DISABLE: "disabled",
    WorkerAction.ENABLE: "enabled", WorkerAction.REVIVE: "revived",
}  # fmt: skip
COMMANDS: Final = {
    "list": "the fleet as a table (the default)",
    "add": "add workers once they are healthy; with --no-wait immediately",
    "remove": "remove workers; their requests in flight complete",
    "disable": "send workers no new requests",
    "enable": "send them requests again",
    "drain": "send workers no new requests, and let those in flight end",
    "revive": "clear their failures and probe them now",
    "set": "change their weight or their limit of requests in flight",
}
_EPILOG: Final = """\
A worker is named by its URL or HOST:PORT, or by a host or port that no other worker has.

examples:
  omni-proxy workers
  omni-proxy workers add http://10.0.0.7:8000 --model qwen3-omni
  omni-proxy workers set 10.0.0.7:8000 --weight 2 --max-inflight 64
  omni-proxy workers drain 10.0.0.7:8000 --wait && omni-proxy workers remove 10.0.0.7:8000
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy workers",
        description="List and change the workers of a running proxy.",
        epilog=_EPILOG,
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=text)
        add_target_arguments(subparser)
        subparser.add_argument(
            "--json", action="store_true", help="print the proxy's replies unchanged"
        )
        if name == "list":
            subparser.add_argument("--model", metavar="NAME", help="only workers with this model")
            continue
        subparser.add_argument("workers", metavar="URL" if name == "add" else "WORKER", nargs="+")
        _add_command_flags(subparser, name)
    return result


def _add_command_flags(subparser: argparse.ArgumentParser, name: str) -> None:
    if name == "add":
        subparser.add_argument("--model", metavar="NAME", help="the model that they serve")
        subparser.add_argument(
            "--capabilities",
            metavar="NAMES",
            help=f"some of {','.join(CAPABILITIES)} (default all)",
        )
        subparser.add_argument(
            "--role", choices=get_args(Role), help="the leg of requests that they serve"
        )
        subparser.add_argument(
            "--kv-connector", choices=get_args(KvConnector),
            help="protocol of KV transfers between prefill and decode workers",
        )  # fmt: skip
        subparser.add_argument(
            "--bootstrap-port", metavar="PORT", type=int, help="bootstrap port of a prefill worker"
        )
        subparser.add_argument(
            "--no-wait", action="store_true",
            help="add them now, healthy or not: they get requests once their probes succeed",
        )  # fmt: skip
    if name in ("add", "set"):
        subparser.add_argument(
            "--weight",
            metavar="N",
            type=int,
            help="relative share of requests; 2 gets twice as many as 1",
        )
        subparser.add_argument(
            "--max-inflight", metavar="N", type=int, help="most requests in flight; 0: no limit"
        )
    if name == "remove":
        subparser.add_argument("--drain", action="store_true", help="drain it first")
    if name == "drain":
        subparser.add_argument("--wait", action="store_true", help="wait until it is drained")
    if name in ("remove", "drain"):
        subparser.add_argument(
            "--timeout-secs", metavar="SECS", type=float,
            help="time for requests in flight; 0: no limit (default [server] drain_timeout_secs)",
        )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(with_default_command(argv, "list"))
    try:
        with AdminClient(admin_target_of(arguments), ANSWER_SECS) as proxy:
            return _run(proxy, arguments)
    except AdminClientError as error:
        print(f"omni-proxy workers: {error}", file=sys.stderr)
        return EXIT_NOT_REACHABLE
    except ChangeRefused as error:
        print(f"omni-proxy workers: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("no longer waiting; the operation continues in the proxy", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(proxy: AdminClient, arguments: argparse.Namespace) -> int:
    if arguments.command == "list":
        fleet = fetch_workers(proxy, arguments.model)
        print(json.dumps(fleet, indent=2) if arguments.json else "\n".join(render_workers(fleet)))
        return 0
    status = 0
    for name in arguments.workers:
        try:
            status = max(status, _change_one(proxy, arguments, name))
        except ChangeRefused as error:
            print(f"omni-proxy workers: {error}", file=sys.stderr)
            status = EXIT_REFUSED
    return status


def _change_one(proxy: AdminClient, arguments: argparse.Namespace, worker_name: str) -> int:
    if arguments.command == "add":
        return _print_result(_add(proxy, arguments, worker_name), "added", arguments)
    record = find_worker(fetch_workers(proxy), worker_name)
    name = arguments.command
    if name == "set":
        settings = {
            key: getattr(arguments, key)
            for key in ("weight", "max_inflight")
            if getattr(arguments, key) is not None
        }
        if not settings:
            raise ChangeRefused("nothing to set: give --weight or --max-inflight")
        reply = require_accepted(proxy.send("PUT", worker_path(record["id"]), settings))
        return _print_result(reply.body, "changed", arguments)
    action = WorkerAction(name)
    body = change_worker(
        proxy, action, record["id"],
        drain=getattr(arguments, "drain", False),
        timeout_secs=getattr(arguments, "timeout_secs", None),
    )  # fmt: skip
    if action is WorkerAction.DRAIN:
        return _follow_drain(proxy, record, arguments, body)
    return _print_result({"worker": record} | body, _DONE[action], arguments)


def _add(proxy: AdminClient, arguments: argparse.Namespace, url: str) -> JsonObject:
    body: dict[str, object] = {"url": normalize_admin_url(url)}
    if arguments.model is not None:
        body["model"] = arguments.model
    if arguments.capabilities is not None:
        names = arguments.capabilities.replace(",", " ").split()
        body["capabilities"] = names
    for key in ("role", "kv_connector", "bootstrap_port", "weight", "max_inflight"):
        if getattr(arguments, key) is not None:
            body[key] = getattr(arguments, key)
    if arguments.no_wait:
        reply = proxy.send("POST", "/workers", body, headers={"Prefer": "respond-async"})
        return require_accepted(reply).body
    # The reply may take as long as the proxy waits for a worker that starts.
    print(f"waiting until {printable(body['url'])} is healthy", file=sys.stderr, flush=True)
    reply = proxy.send("POST", "/workers", body)
    if reply.code == NOT_HEALTHY:
        raise ChangeRefused(f"{printable(reply.refusal)}; to add it now: --no-wait")
    return require_accepted(reply).body


def _print_result(body: JsonObject, done: str, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps(body, indent=2))
        return 0
    record = body["worker"]
    overdue = body.get("drained") is False
    if done == "removed":
        state = "requests were still in flight at the deadline" if overdue else ""
        if body.get("process") == "stops":
            ends = "its process stops, `workers add` starts it again"
            state = f"{state}; {ends}" if state else ends
    else:
        state = describe_state(record)
    print(f"{done} {printable(record['url'])}" + (f": {state}" if state else ""))
    return EXIT_REFUSED if overdue else 0


def _follow_drain(
    proxy: AdminClient, record: JsonObject, arguments: argparse.Namespace, body: JsonObject
) -> int:
    """Print the progress of the drain, with --wait until its end."""
    record = body.get("worker") or record
    printed = ""
    while arguments.wait and (draining := record.get("draining") or {}):
        if draining.get("state") != "draining":
            break
        if (now := describe_state(record)) != printed and not arguments.json:
            print(f"{printable(record['url'])}: {now}", file=sys.stderr, flush=True)
            printed = now
        _PAUSE.wait(POLL_SECS)
        record = require_accepted(proxy.get(worker_path(record["id"]))).body
    if arguments.json:
        print(json.dumps(record, indent=2))
    else:
        print(f"{printable(record['url'])}: {describe_state(record)}")
    overdue = (record.get("draining") or {}).get("state") == "overdue"
    return EXIT_REFUSED if overdue else 0


def render_workers(fleet: Sequence[JsonObject]) -> list[str]:
    if not fleet:
        return ["no workers: omni-proxy workers add URL, or put them into the file"]
    has_roles = any(record.get("role", "regular") != "regular" for record in fleet)
    rows = [
        (
            record["url"],
            *([printable(record["role"])] if has_roles else []),
            _models(record),
            record.get("in_flight", 0),
            record.get("routed_requests", 0),
            record.get("failed_requests", 0),
            record.get("weight_version") or NOTHING,
            record.get("origin") or NOTHING,
            describe_state(record),
        )
        for record in fleet
    ]
    head = [_HEAD[0], "ROLE", *_HEAD[1:]] if has_roles else _HEAD
    return render_table(head, rows, right_aligned=["BUSY", "ROUTED", "FAILED"])


def _models(record: JsonObject) -> str:
    """The worker's model, and its number of adapters."""
    adapters = [name for name in record.get("adapters") or () if ":" not in str(name)]
    count = len(adapters or record.get("adapters") or ())
    more = f" +{count} adapter{'s' if count > 1 else ''}" if count else ""
    return f"{record.get('model') or 'any'}{more}"


def _by(record: JsonObject) -> str:
    """The caller that disabled the worker, if the proxy reports one."""
    who = (record.get("disabled_by") or {}).get("by")
    return f", by {printable(who)}" if who else ""


def describe_state(record: JsonObject) -> str:
    """Whether the worker of a GET /workers record takes requests, and if not why."""
    if draining := record.get("draining"):
        in_flight = draining.get("in_flight", 0)
        deadline = parse_time(draining.get("deadline"))
        secs_left = (deadline - datetime.now(UTC)).total_seconds() if deadline else 0.0
        until = (
            f", {format_age(secs_left)} left"
            if secs_left > 0 and draining.get("state") == "draining"
            else ""
        )
        return f"{printable(draining.get('state'))}, {in_flight} in flight{until}{_by(record)}"
    health = printable(record.get("health_state"))
    if record.get("disabled"):
        return f"disabled, {health}{_by(record)}"
    if record.get("paused") and record.get("routable"):
        return f"PAUSED, {health}: {RESUME_COMMAND}"
    if record.get("why") and not record.get("trial"):
        return printable(strip_noise(str(record["why"])))
    if record.get("held_by"):
        return f"held by {printable(', '.join(map(str, record['held_by'])))}, {health}"
    if record.get("trial"):
        return "half-open"
    error = record.get("last_error")
    return (
        f"{health}: {printable(strip_noise(str(error)))}"
        if error and health != "healthy"
        else health
    )
