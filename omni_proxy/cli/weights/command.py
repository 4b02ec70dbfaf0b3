"""`omni-proxy weights ...`: shows the weights of a running proxy's workers, and operates on them.

A client of the admin API. Exit status 0: done; 1: the proxy or a worker refused, or replicas
differ; 2: no proxy could be reached, or wrong usage; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any, Final

from omni_proxy.admin_ops.admin_route_table import ABORT_SYNC
from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.cli import EXIT_INTERRUPTED
from omni_proxy.cli.client.admin_client import (
    EXIT_NOT_REACHABLE,
    AdminClient,
    AdminClientError,
    AdminReply,
    JsonObject,
    add_target_arguments,
    admin_target_of,
    with_default_command,
)
from omni_proxy.cli.client.feed_model import PausedWorker
from omni_proxy.cli.client.worker_changes import EXIT_REFUSED, ChangeRefused, require_accepted
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.cli.screen.diagnosis import describe_rollout, describe_sync, pause_lines
from omni_proxy.cli.terminal_text import (
    NOTHING,
    format_age,
    format_size,
    parse_time,
    printable,
    render_table,
)
from omni_proxy.cli.weights.rollout import add_rollout_arguments, run_rollout
from omni_proxy.weight_sync.protocol.checksum_agreement import compare_answers

POLL_SECS: Final = 0.5


def call_with_progress(call: Callable[[], AdminReply], describe: Callable[[], str]) -> AdminReply:
    """The result of `call`, with its exceptions; `describe` returns the progress or ""."""
    future: Future[AdminReply] = Future()
    threading.Thread(target=_fill, args=(future, call), name="admin-request", daemon=True).start()
    printed = ""
    while True:
        try:
            return future.result(POLL_SECS)
        except TimeoutError:
            if future.done():  # the reply arrived just now, or `call` itself raised TimeoutError
                return future.result()
        if (now := describe()) and now != printed:
            print(now, file=sys.stderr, flush=True)
            printed = now


def _fill(future: Future[AdminReply], call: Callable[[], AdminReply]) -> None:
    try:
        future.set_result(call())
    except Exception as error:  # raised again where the result is awaited
        future.set_exception(error)


def confirm(question: str) -> bool:
    """Ask on the terminal; only `y` and `yes` confirm."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


WAIT_SECS: Final = 1200.0  # longer than the proxy waits for the operation lock and its workers
COMMANDS: Final = {
    "status": "running operation, version of each worker, uncertain workers (the default)",
    "pause": "stop generation on every worker",
    "continue": "resume generation on every worker",
    "checksum": "compare checksums of all workers' weights; generation stops meanwhile",
    "resolve": "return uncertain workers to rotation, after you verified their weights",
    "abort": "end a trainer's group and the operation that runs in it",
    "versions": "stored versions, the newest first",
    "rollback": "deliver a stored version to all workers",
    "rollout": "give workers new weights, a few at a time, while the others serve",
}
ROLLBACK: Final = "/weights/rollback"
SELECTING: Final = ("pause", "continue", "checksum")
# Commands that only read, and their paths.
READ_PATHS: Final = {"status": "/weights", "versions": "/weights/versions"}


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy weights",
        description="Show the weights of a running proxy's workers, and operate on them.",
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=text)
        add_target_arguments(subparser)
        subparser.add_argument(
            "--json", action="store_true", help="print the proxy's reply unchanged"
        )
        if name in SELECTING:
            subparser.add_argument(
                "--selector", metavar="TERMS", help="only these workers, as in model=m,id!=x"
            )
        if name == "pause":
            subparser.add_argument(
                "--mode",
                default="retract",
                choices=("abort", "retract", "in_place"),
                help="what happens to running requests (default retract: they resume later)",
            )
        if name == "rollback":
            subparser.add_argument(
                "version", metavar="VERSION", nargs="?",
                help="its label or number (default: the version before the current one)",
            )  # fmt: skip
            subparser.add_argument(
                "--yes", "-y", action="store_true", help="do not ask for confirmation"
            )
        if name == "rollout":
            add_rollout_arguments(subparser)
    return result


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(with_default_command(argv, "status"))
    try:
        if arguments.command == "rollout":
            return run_rollout(admin_target_of(arguments), arguments, WAIT_SECS)
        with AdminClient(admin_target_of(arguments), WAIT_SECS) as proxy:
            reply = _ask(proxy, arguments)
    except AdminClientError as error:
        print(f"omni-proxy weights: {error}", file=sys.stderr)
        return EXIT_NOT_REACHABLE
    except ChangeRefused as error:
        print(f"omni-proxy weights: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("no longer waiting; the operation continues in the proxy", file=sys.stderr)
        return EXIT_INTERRUPTED
    return _print_result(reply, arguments)


def _ask(proxy: AdminClient, arguments: argparse.Namespace) -> AdminReply:
    """Raises AdminClientError, ChangeRefused."""
    if arguments.command in READ_PATHS:
        return proxy.get(READ_PATHS[arguments.command])
    path, body = {
        "pause": ("/pause_generation", {"mode": getattr(arguments, "mode", "")}),
        "continue": ("/continue_generation", {}),
        "checksum": ("/weights_checker", {"action": "checksum"}),
        "resolve": ("/weights/resolve", {"acknowledge": True}),
        "abort": (ABORT_SYNC, {}),
        "rollback": (ROLLBACK, {}),
    }[arguments.command]
    if arguments.command == "rollback":
        body = {"version": _confirmed(proxy, arguments)}
    selector = getattr(arguments, "selector", None)
    query = {"selector": selector} if selector else None
    with AdminClient(proxy.target) as progress_client:
        return call_with_progress(
            lambda: proxy.send("POST", path, body, query),
            lambda: "" if arguments.json else _progress(progress_client, path),
        )


def _confirmed(proxy: AdminClient, arguments: argparse.Namespace) -> int:
    """The number of the requested version. Raises AdminClientError, ChangeRefused."""
    version = find_version(
        require_accepted(proxy.get(READ_PATHS["versions"])).body, arguments.version
    )
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise AdminClientError(
                f"this delivers {version_name(version)} to all workers; stdin is not a terminal to "
                "confirm on: pass --yes"
            )
        if not confirm(rollback_question(version)):
            raise ChangeRefused("cancelled")
    return int(version["number"])


def _progress(proxy: AdminClient, path: str) -> str:
    """Progress of the call to `path`; "" if unknown."""
    try:
        running = proxy.get(READ_PATHS["status"]).body.get("operation")
    except AdminClientError:
        return ""
    if not isinstance(running, dict):
        return ""
    queued = "" if running["path"] == path else f"waiting for {printable(running['path'])}: "
    return f"{queued}{printable(running['step'])}, {describe_replies(running)}"


def _print_result(reply: AdminReply, arguments: argparse.Namespace) -> int:
    body = reply.body
    verdict = (
        checksum_verdict(body) if arguments.command == "checksum" and "results" in body else None
    )
    if arguments.json:
        print(json.dumps(body, indent=2))
    elif isinstance(body.get("error"), dict):
        print(f"status {reply.status}: {printable(reply.refusal)}", file=sys.stderr)
    else:
        print("\n".join(SHOWN[arguments.command](body)))
    well = reply.status < 400 and not (verdict and verdict["mismatched"])
    return 0 if well else 1


# Responses of the weight routes, as lines for a terminal.

HISTORY_SHOWN: Final = 5


def _status(body: JsonObject) -> list[str]:
    running = body["operation"]
    running_text = "nothing" if running is None else _running(running)
    paused = body.get("paused") or {}
    rows = [
        (row["worker"], row["weight_version"] or "-", str(row["weight_epoch"]),
         "yes" if row["routable"] else "no",
         ", ".join(row["held_by"]) or ("PAUSED" if row["worker"] in paused else "-"))
        for row in body["workers"]
    ]  # fmt: skip
    lines = [
        f"running: {running_text}; waiting: {len(body['waiting'])}",
        f"newest: epoch {body['weight_epoch']}, version {body['weight_version'] or '-'}",
        *render_table(("WORKER", "VERSION", "EPOCH", "ROUTABLE", "HELD BY"), rows),
    ]
    if sync := describe_sync(body.get("sync")):
        lines.insert(1, f"sync: {sync}")
    if rollout := describe_rollout(body.get("rollout")):
        lines.insert(1, f"rollout: {rollout}")
    lines += [f"uncertain: {url}: {reason}" for url, reason in body["uncertain"].items()]
    if body["uncertain"]:
        lines.append("once their weights are verified: omni-proxy weights resolve")
    pauses = [PausedWorker(**record) for record in paused.values()]
    lines += [f"PAUSED: {line}" for line in pause_lines(pauses, len(rows), datetime.now(UTC))]
    if body["journal"]["error"]:
        lines.append(f"journal: {body['journal']['error']}")
    for entry in body["history"][-HISTORY_SHOWN:]:
        result = f"{entry['http_status']} {entry['message']}"
        lines.append(f"{entry['ended_at'][:19]} {entry['path']} {entry['secs']:.1f} s: {result}")
    return lines


def _running(operation: Mapping[str, Any]) -> str:
    lasts = f"{operation['age_secs']:.0f} s"
    by = f" by {printable(operation['caller'])}" if operation.get("caller") else ""
    path, step = operation["path"], operation["step"]
    return f"{path} for {lasts}{by}, {step}, {describe_replies(operation)}"


def describe_replies(operation: Mapping[str, Any]) -> str:
    rows = operation["workers"]
    done = sum(row["progress"] in ("done", "failed") for row in rows)
    return f"{done} of {len(rows)} answered"


def _broadcast(body: JsonObject) -> list[str]:
    rows = [
        (entry["worker"], _outcome(entry), f"{entry['seconds']:.2f}") for entry in body["results"]
    ]
    return [str(body["message"]), *render_table(("WORKER", "OUTCOME", "SECONDS"), rows)]


def _outcome(entry: Mapping[str, Any]) -> str:
    if entry["success"]:
        return "ok"
    reason = entry.get("error") or _answer(entry).reason
    return f"{reason} ({entry['standing']})" if "standing" in entry else str(reason)


def _checksums(body: JsonObject) -> list[str]:
    verdict = checksum_verdict(body)
    rows = []
    for entry in body["results"]:
        url = entry["worker"]
        standing = next(
            (name for name in ("checked", "mismatched", "unverified") if url in verdict[name]), "-"
        )
        checksum = verdict["checksums"].get(url) or verdict["reasons"].get(url, "-")
        rows.append((url, standing, checksum))
    summary = "all compared workers agree"
    if verdict["mismatched"]:
        summary = "the weights differ"
    elif not verdict["checked"]:
        summary = "nothing could be compared"
    return [summary, *render_table(("WORKER", "STANDING", "CHECKSUM"), rows)]


def _aborted(body: JsonObject) -> list[str]:
    lines = [printable(body["message"])]
    lines += [f"uncertain: {url}: {reason}" for url, reason in body["uncertain"].items()]
    return lines if body["ended"] else [*lines, "members have not answered yet"]


def _resolved(body: JsonObject) -> list[str]:
    back = body.get("resolved_worker_ids", [])
    lines = [f"back: {', '.join(back) or 'no worker was uncertain'}"]
    return lines + [f"still out: {u}: {reason}" for u, reason in body.get("unresolved", {}).items()]


def _rolled_back(body: JsonObject) -> list[str]:
    labels = body.get("weight_versions") or {}
    now = [f"{printable(label or '-')}" for label in dict.fromkeys(labels.values())]
    lines = _broadcast(body)
    if labels:
        lines.append(f"now: {', '.join(now)} on {len(labels)}, epoch {body.get('weight_epoch')}")
    return lines


def _versions(body: JsonObject) -> list[str]:
    return render_versions(body, datetime.now(UTC))


def checksum_verdict(body: JsonObject) -> JsonObject:
    return compare_answers({entry["worker"]: _answer(entry) for entry in body["results"]}).to_dict()


def _answer(entry: Mapping[str, Any]) -> WorkerResult:
    status, body = entry.get("status_code"), entry.get("body")
    return WorkerResult(entry["worker"], status, body, entry.get("error", ""))


SHOWN: Final = {
    "status": _status,
    "pause": _broadcast,
    "continue": _broadcast,
    "checksum": _checksums,
    "resolve": _resolved,
    "abort": _aborted,
    "versions": _versions,
    "rollback": _rolled_back,
}


# Stored versions. A version is named by its label or its number; of several with one label the
# newest is taken, and the confirmation of a rollback names it.

_HEAD: Final = ("VERSION", "NUMBER", "EPOCH", "STATE", "RECEIVED", "SIZE", "IN", "CHECKSUM")
_CHECKSUM_CHARS: Final = 12
_NONE_KEPT: Final = (
    'versions are not stored: set [weight_sync] mode = "receive" or "both" in the proxy\'s file'
)


def render_versions(body: JsonObject, now: datetime) -> list[str]:
    """A table in the order of the reply, the newest first."""
    rows = [_cells(version, now) for version in body.get("versions") or ()]
    if not rows:
        return [_no_versions_text(body)]
    problem = [_no_versions_text(body)] if body.get("error") else []
    return [*problem, *render_table(_HEAD, rows, right_aligned=("NUMBER", "EPOCH", "SIZE"))]


def _no_versions_text(body: JsonObject) -> str:
    if body.get("error"):
        return f"versions can't be stored: {printable(body['error'])}"
    return f"no versions yet in {printable(body['store'])}" if body.get("store") else _NONE_KEPT


def _cells(version: JsonObject, now: datetime) -> Sequence[object]:
    created_at = parse_time(version.get("created_at"))
    media = [name for name in ("memory", "disk") if version.get(f"{_WORD[name]}_{name}")]
    return (
        version["version"],
        version["number"],
        version.get("weight_epoch") or NOTHING,
        _state(version),
        f"{format_age((now - created_at).total_seconds())} ago" if created_at else NOTHING,
        format_size(version.get("bytes", 0)),
        "+".join(media) or NOTHING,
        str(version.get("checksum") or NOTHING)[:_CHECKSUM_CHARS],
    )


_WORD: Final = {"memory": "in", "disk": "on"}


def _state(version: JsonObject) -> str:
    if version.get("current"):
        return "current"
    return "kept" if version.get("published") else "incomplete"


def find_version(body: JsonObject, name: str | None) -> JsonObject:
    """The version with this label or number; None: the one before the current. Raises
    ChangeRefused, which lists the stored versions."""
    versions: list[JsonObject] = body.get("versions") or []
    if not versions:
        raise ChangeRefused(_no_versions_text(body))
    if name is None:
        published = sorted(filter(_epoch, versions), key=_epoch, reverse=True)
        if len(published) < 2:
            raise ChangeRefused(
                f"there is no version before the current one; {_available(versions)}"
            )
        return published[1]
    labelled = [version for version in versions if version["version"] == name]
    numbered = [version for version in versions if str(version["number"]) == name]
    if not labelled and not numbered:
        raise ChangeRefused(f"no version is called {name}; {_available(versions)}")
    return max(labelled or numbered, key=lambda version: (_epoch(version), version["number"]))


def _epoch(version: JsonObject) -> int:
    return int(version.get("weight_epoch") or 0)


def _available(versions: Sequence[JsonObject]) -> str:
    return f"stored: {', '.join(map(version_name, versions))}"


def version_name(version: JsonObject) -> str:
    label, number = printable(version["version"]), version["number"]
    return f"version {number}" if label == str(number) else f"{label} (version {number})"


def rollback_question(version: JsonObject) -> str:
    """The confirmation question before a rollback."""
    more = ""
    if version.get("current"):
        more = ", which is the current one,"
    elif not version.get("published"):
        more = ", which was never on all workers,"
    return f"Deliver {version_name(version)}{more} to all workers?"
