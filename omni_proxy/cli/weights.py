"""`omni-proxy weights ...`: how the weights behind a running proxy stand, and operations on them.

Asks the proxy over HTTP and changes nothing by itself. Exit status 0: done; 1: the proxy or a
worker said no, or replicas differ; 2: it could not be asked like that; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.cli.client.admin_client import (
    NO_SUCH_PLACE,
    AdminClient,
    AdminClientError,
    AdminReply,
    JsonObject,
    add_target_arguments,
    admin_target_of,
    with_default_command,
)
from omni_proxy.cli.client.progress import call_with_progress, confirm
from omni_proxy.cli.client.worker_changes import ChangeRefused, require_accepted
from omni_proxy.cli.flags.peer_flags import CommandParser
from omni_proxy.cli.rollout import add_rollout_arguments, run_rollout
from omni_proxy.cli.screen.diagnosis import describe_sync, pause_lines
from omni_proxy.cli.screen.feed_model import PausedWorker
from omni_proxy.cli.screen.rollout_lines import describe_rollout
from omni_proxy.cli.screen.text_table import (
    NOTHING,
    format_age,
    format_size,
    parse_time,
    printable,
    render_table,
)
from omni_proxy.weight_sync.protocol.checksum_agreement import compare_answers

WAIT_SECS: Final = 1200.0  # longer than the proxy itself may wait for its turn and its workers
COMMANDS: Final = {
    "status": "what runs, which version every worker has, who is uncertain (the default)",
    "pause": "stop generation on every worker",
    "continue": "let every worker generate again",
    "checksum": "compare the weights of all workers; they stop while they compute",
    "resolve": "bring uncertain workers back: you have verified their weights",
    "versions": "the versions that the proxy keeps, the newest first",
    "rollback": "give all workers a version that is kept",
    "rollout": "give workers new weights, a few at a time, while the others serve",
}
ROLLBACK: Final = "/weights/rollback"
SELECTING: Final = ("pause", "continue", "checksum")
# What only looks, and where.
ASKED: Final = {"status": "/weights", "versions": "/weights/versions"}
REFUSED: Final = 1
INTERRUPTED: Final = 130
HISTORYSHOWN: Final = 5


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="omni-proxy weights",
        description="Look at the weights of a running proxy's workers, and operate on them.",
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_target_arguments(one)
        one.add_argument("--json", action="store_true", help="the proxy's answer as it is")
        if name in SELECTING:
            one.add_argument(
                "--selector", metavar="TERMS", help="only these workers, as in model=m,id!=x"
            )
        if name == "pause":
            one.add_argument(
                "--mode",
                default="retract",
                choices=("abort", "retract", "in_place"),
                help="what becomes of running requests (default retract: they go on later)",
            )
        if name == "rollback":
            one.add_argument(
                "version", metavar="VERSION", nargs="?",
                help="its label or number (default: the one before the current)",
            )  # fmt: skip
            one.add_argument("--yes", "-y", action="store_true", help="ask nobody first")
        if name == "rollout":
            add_rollout_arguments(one)
    return made


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(with_default_command(argv, "status"))
    try:
        if arguments.command == "rollout":
            return run_rollout(admin_target_of(arguments), arguments, WAIT_SECS)
        with AdminClient(admin_target_of(arguments), WAIT_SECS) as proxy:
            answer = _ask(proxy, arguments)
    except AdminClientError as why:
        print(f"omni-proxy weights: {why}", file=sys.stderr)
        return NO_SUCH_PLACE
    except ChangeRefused as why:
        print(f"omni-proxy weights: {why}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("not waited for any longer; what was asked for goes on", file=sys.stderr)
        return INTERRUPTED
    return _tell(answer, arguments)


def _ask(proxy: AdminClient, arguments: argparse.Namespace) -> AdminReply:
    """Raises AdminClientError, ChangeRefused."""
    if arguments.command in ASKED:
        return proxy.get(ASKED[arguments.command])
    path, body = {
        "pause": ("/pause_generation", {"mode": getattr(arguments, "mode", "")}),
        "continue": ("/continue_generation", {}),
        "checksum": ("/weights_checker", {"action": "checksum"}),
        "resolve": ("/weights/resolve", {"acknowledge": True}),
        "rollback": (ROLLBACK, {}),
    }[arguments.command]
    if arguments.command == "rollback":
        body = {"version": _agreed(proxy, arguments)}
    selector = getattr(arguments, "selector", None)
    query = {"selector": selector} if selector else None
    with AdminClient(proxy.place) as beside:
        return call_with_progress(
            lambda: proxy.send("POST", path, body, query),
            lambda: "" if arguments.json else _how_far(beside, path),
        )


def _agreed(proxy: AdminClient, arguments: argparse.Namespace) -> int:
    """The number of the version that is meant. Raises AdminClientError, ChangeRefused."""
    version = find_version(require_accepted(proxy.get(ASKED["versions"])).told, arguments.version)
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise AdminClientError(
                f"it would give {version_name(version)} to all workers, "
                f"and nobody is here to agree: "
                "say --yes"
            )
        if not confirm(rollback_question(version)):
            raise ChangeRefused("nothing was changed")
    return int(version["number"])


def _how_far(proxy: AdminClient, path: str) -> str:
    """Of the call to `path`, as far as the proxy tells."""
    try:
        running = proxy.get(ASKED["status"]).told.get("operation")
    except AdminClientError:
        return ""
    if not isinstance(running, dict):
        return ""
    behind = "" if running["path"] == path else f"waiting for {printable(running['path'])}: "
    return f"{behind}{printable(running['step'])}, {describe_replies(running)}"


def _tell(answer: AdminReply, arguments: argparse.Namespace) -> int:
    told = answer.told
    verdict = (
        compare_checksums(told) if arguments.command == "checksum" and "results" in told else None
    )
    if arguments.json:
        print(json.dumps(told, indent=2))
    elif isinstance(told.get("error"), dict):
        print(f"status {answer.status}: {printable(answer.refusal)}", file=sys.stderr)
    else:
        print("\n".join(SHOWN[arguments.command](told)))
    well = answer.status < 400 and not (verdict and verdict["mismatched"])
    return 0 if well else 1


# Responses of the weight routes, as lines for a terminal.

HISTORY_SHOWN: Final = 5


def _status(told: JsonObject) -> list[str]:
    running = told["operation"]
    words = "nothing" if running is None else _running(running)
    paused = told.get("paused") or {}
    rows = [
        (row["worker"], row["weight_version"] or "-", str(row["weight_epoch"]),
         "yes" if row["routable"] else "no",
         ", ".join(row["held_by"]) or ("PAUSED" if row["worker"] in paused else "-"))
        for row in told["workers"]
    ]  # fmt: skip
    lines = [
        f"under way: {words}; waiting: {len(told['waiting'])}",
        f"newest: epoch {told['weight_epoch']}, version {told['weight_version'] or '-'}",
        *render_table(("WORKER", "VERSION", "EPOCH", "ROUTABLE", "HELD BY"), rows),
    ]
    if sync := describe_sync(told.get("sync")):
        lines.insert(1, f"sync: {sync}")
    if rollout := describe_rollout(told.get("rollout")):
        lines.insert(1, f"rollout: {rollout}")
    lines += [f"uncertain: {url}: {reason}" for url, reason in told["uncertain"].items()]
    if told["uncertain"]:
        lines.append("bring them back, once their weights are verified: omni-proxy weights resolve")
    pauses = [PausedWorker(**each) for each in paused.values()]
    lines += [f"PAUSED: {each}" for each in pause_lines(pauses, len(rows), datetime.now(UTC))]
    if told["journal"]["error"]:
        lines.append(f"journal: {told['journal']['error']}")
    for past in told["history"][-HISTORY_SHOWN:]:
        said = f"{past['http_status']} {past['message']}"
        lines.append(f"{past['ended_at'][:19]} {past['path']} {past['secs']:.1f} s: {said}")
    return lines


def _running(operation: Mapping[str, Any]) -> str:
    format_age = f"{operation['age_secs']:.0f} s"
    return (
        f"{operation['path']} for {format_age}, {operation['step']}, {describe_replies(operation)}"
    )


def describe_replies(operation: Mapping[str, Any]) -> str:
    rows = operation["workers"]
    done = sum(row["progress"] in ("done", "failed") for row in rows)
    return f"{done} of {len(rows)} answered"


def _broadcast(told: JsonObject) -> list[str]:
    rows = [(each["worker"], _outcome(each), f"{each['seconds']:.2f}") for each in told["results"]]
    return [str(told["message"]), *render_table(("WORKER", "OUTCOME", "SECONDS"), rows)]


def _outcome(entry: Mapping[str, Any]) -> str:
    if entry["success"]:
        return "ok"
    reason = entry.get("error") or _answer(entry).why
    return f"{reason} ({entry['standing']})" if "standing" in entry else str(reason)


def _checksums(told: JsonObject) -> list[str]:
    verdict = compare_checksums(told)
    rows = []
    for each in told["results"]:
        url = each["worker"]
        standing = next(
            (name for name in ("checked", "mismatched", "unverified") if url in verdict[name]), "-"
        )
        found = verdict["checksums"].get(url) or verdict["reasons"].get(url, "-")
        rows.append((url, standing, found))
    words = "no two workers that could be compared differ"
    if verdict["mismatched"]:
        words = "the weights differ"
    elif not verdict["checked"]:
        words = "nothing could be compared"
    return [words, *render_table(("WORKER", "STANDING", "CHECKSUM"), rows)]


def _resolved(told: JsonObject) -> list[str]:
    back = told.get("resolved_worker_ids", [])
    lines = [f"back: {', '.join(back) or 'nobody was uncertain'}"]
    return lines + [f"still out: {u}: {why}" for u, why in told.get("unresolved", {}).items()]


def _rolled_back(told: JsonObject) -> list[str]:
    labels = told.get("weight_versions") or {}
    now = [f"{printable(label or '-')}" for label in dict.fromkeys(labels.values())]
    lines = _broadcast(told)
    if labels:
        lines.append(f"now: {', '.join(now)} on {len(labels)}, epoch {told.get('weight_epoch')}")
    return lines


def _versions(told: JsonObject) -> list[str]:
    return render_versions(told, datetime.now(UTC))


def compare_checksums(told: JsonObject) -> JsonObject:
    return compare_answers({each["worker"]: _answer(each) for each in told["results"]}).to_dict()


def _answer(entry: Mapping[str, Any]) -> WorkerResult:
    status, body = entry.get("status_code"), entry.get("body")
    return WorkerResult(entry["worker"], status, body, entry.get("error", ""))


SHOWN: Final = {
    "status": _status,
    "pause": _broadcast,
    "continue": _broadcast,
    "checksum": _checksums,
    "resolve": _resolved,
    "versions": _versions,
    "rollback": _rolled_back,
}


# The stored versions. A version is named by its label or else by its number; of several with one
# label the newest is meant, and the question before a rollback names the version that is requested.

_HEAD: Final = ("VERSION", "NUMBER", "EPOCH", "STATE", "RECEIVED", "SIZE", "IN", "CHECKSUM")
_CHECKSUM_CHARS: Final = 12
_NONE_KEPT: Final = (
    'no versions are kept: that takes [weight_sync] mode = "receive" or "both" in the proxy\'s file'
)


def render_versions(told: JsonObject, now: datetime) -> list[str]:
    """The newest first, as they were told."""
    rows = [_cells(version, now) for version in told.get("versions") or ()]
    if not rows:
        return [_nothing(told)]
    trouble = [_nothing(told)] if told.get("error") else []
    return [*trouble, *render_table(_HEAD, rows, right=("NUMBER", "EPOCH", "SIZE"))]


def _nothing(told: JsonObject) -> str:
    if told.get("error"):
        return f"the versions can't be kept: {printable(told['error'])}"
    return f"no versions yet in {printable(told['store'])}" if told.get("store") else _NONE_KEPT


def _cells(version: JsonObject, now: datetime) -> Sequence[object]:
    at = parse_time(version.get("created_at"))
    places = [name for name in ("memory", "disk") if version.get(f"{_WORD[name]}_{name}")]
    return (
        version["version"],
        version["number"],
        version.get("weight_epoch") or NOTHING,
        _state(version),
        f"{format_age((now - at).total_seconds())} ago" if at else NOTHING,
        format_size(version.get("bytes", 0)),
        "+".join(places) or NOTHING,
        str(version.get("checksum") or NOTHING)[:_CHECKSUM_CHARS],
    )


_WORD: Final = {"memory": "in", "disk": "on"}


def _state(version: JsonObject) -> str:
    if version.get("current"):
        return "current"
    return "kept" if version.get("published") else "incomplete"


def find_version(told: JsonObject, wanted: str | None) -> JsonObject:
    """By default the one before the current. Raises ChangeRefused, which names those that there
    are."""
    versions: list[JsonObject] = told.get("versions") or []
    if not versions:
        raise ChangeRefused(_nothing(told))
    if wanted is None:
        published = sorted(filter(_epoch, versions), key=_epoch, reverse=True)
        if len(published) < 2:
            raise ChangeRefused(f"there is no version before the current one; {_those(versions)}")
        return published[1]
    labelled = [version for version in versions if version["version"] == wanted]
    numbered = [version for version in versions if str(version["number"]) == wanted]
    if not labelled and not numbered:
        raise ChangeRefused(f"no version is called {wanted}; {_those(versions)}")
    return max(labelled or numbered, key=lambda version: (_epoch(version), version["number"]))


def _epoch(version: JsonObject) -> int:
    return int(version.get("weight_epoch") or 0)


def _those(versions: Sequence[JsonObject]) -> str:
    return f"there are: {', '.join(map(version_name, versions))}"


def version_name(version: JsonObject) -> str:
    label, number = printable(version["version"]), version["number"]
    return f"version {number}" if label == str(number) else f"{label} (version {number})"


def rollback_question(version: JsonObject) -> str:
    """What it means to go to that one."""
    more = ""
    if version.get("current"):
        more = ", which is the current one,"
    elif not version.get("published"):
        more = ", which was never on all workers,"
    return f"Give {version_name(version)}{more} to all workers?"
