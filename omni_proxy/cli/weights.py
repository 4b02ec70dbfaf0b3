"""`omni-proxy weights ...`: how the weights behind a running proxy stand, and operations on them.

Asks the proxy over HTTP and changes nothing by itself. Exit status 0: done; 1: the proxy or a
worker said no, or replicas differ; 2: it could not be asked like that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from omni_proxy.cli.finding import (
    NO_SUCH_PLACE,
    Answer,
    CannotAsk,
    Proxy,
    Told,
    add_place,
    place_of,
)
from omni_proxy.cli.judging import sync_words
from omni_proxy.cli.tables import plain, table
from omni_proxy.control.agreement import compare
from omni_proxy.control.outcomes import WorkerAnswer

WAIT_SECS: Final = 1200.0  # longer than the proxy itself may wait for its turn and its workers
COMMANDS: Final = {
    "status": "what runs, which version every worker has, who is uncertain",
    "pause": "stop generation on every worker",
    "continue": "let every worker generate again",
    "checksum": "compare the weights of all workers; they stop while they compute",
    "resolve": "bring uncertain workers back: you have verified their weights",
}
HISTORY_SHOWN: Final = 5


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="omni-proxy weights",
        description="Look at the weights of a running proxy's workers, and operate on them.",
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_place(one)
        one.add_argument("--json", action="store_true", help="the proxy's answer as it is")
        if name not in ("status", "resolve"):
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
    return made


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        with Proxy(place_of(arguments), WAIT_SECS) as proxy:
            answer = _ask(proxy, arguments)
    except CannotAsk as why:
        print(f"omni-proxy weights: {why}", file=sys.stderr)
        return NO_SUCH_PLACE
    return _tell(answer, arguments)


def _ask(proxy: Proxy, arguments: argparse.Namespace) -> Answer:
    if arguments.command == "status":
        return proxy.get("/weights")
    path, body = {
        "pause": ("/pause_generation", {"mode": getattr(arguments, "mode", "")}),
        "continue": ("/continue_generation", {}),
        "checksum": ("/weights_checker", {"action": "checksum"}),
        "resolve": ("/weights/resolve", {"acknowledge": True}),
    }[arguments.command]
    selector = getattr(arguments, "selector", None)
    return proxy.send("POST", path, body, {"selector": selector} if selector else None)


def _tell(answer: Answer, arguments: argparse.Namespace) -> int:
    told = answer.told
    verdict = _compared(told) if arguments.command == "checksum" and "results" in told else None
    if arguments.json:
        print(json.dumps(told, indent=2))
    elif "error" in told:
        print(f"status {answer.status}: {plain(answer.refusal)}", file=sys.stderr)
    else:
        print("\n".join(_SHOWN[arguments.command](told)))
    well = answer.status < 400 and not (verdict and verdict["mismatched"])
    return 0 if well else 1


def _status(told: Told) -> list[str]:
    running = told["operation"]
    words = "nothing" if running is None else _running(running)
    rows = [
        (row["worker"], row["weight_version"] or "-", str(row["weight_epoch"]),
         "yes" if row["routable"] else "no", ", ".join(row["held_by"]) or "-")
        for row in told["workers"]
    ]  # fmt: skip
    lines = [
        f"under way: {words}; waiting: {len(told['waiting'])}",
        f"newest: epoch {told['weight_epoch']}, version {told['weight_version'] or '-'}",
        *table(("WORKER", "VERSION", "EPOCH", "ROUTABLE", "HELD BY"), rows),
    ]
    if sync := sync_words(told.get("sync")):
        lines.insert(1, f"sync: {sync}")
    lines += [f"uncertain: {url}: {reason}" for url, reason in told["uncertain"].items()]
    if told["journal"]["error"]:
        lines.append(f"journal: {told['journal']['error']}")
    for past in told["history"][-HISTORY_SHOWN:]:
        said = f"{past['http_status']} {past['message']}"
        lines.append(f"{past['ended_at'][:19]} {past['path']} {past['secs']:.1f} s: {said}")
    return lines


def _running(operation: Mapping[str, Any]) -> str:
    rows = operation["workers"]
    done = sum(row["progress"] in ("done", "failed") for row in rows)
    age = f"{operation['age_secs']:.0f} s"
    return f"{operation['path']} for {age}, {operation['step']}, {done} of {len(rows)} answered"


def _broadcast(told: Told) -> list[str]:
    rows = [(each["worker"], _outcome(each), f"{each['seconds']:.2f}") for each in told["results"]]
    return [str(told["message"]), *table(("WORKER", "OUTCOME", "SECONDS"), rows)]


def _outcome(entry: Mapping[str, Any]) -> str:
    if entry["success"]:
        return "ok"
    reason = entry.get("error") or _answer(entry).why
    return f"{reason} ({entry['standing']})" if "standing" in entry else str(reason)


def _checksums(told: Told) -> list[str]:
    verdict = _compared(told)
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
    return [words, *table(("WORKER", "STANDING", "CHECKSUM"), rows)]


def _resolved(told: Told) -> list[str]:
    back = told.get("resolved_worker_ids", [])
    lines = [f"back: {', '.join(back) or 'nobody was uncertain'}"]
    return lines + [f"still out: {u}: {why}" for u, why in told.get("unresolved", {}).items()]


def _compared(told: Told) -> Told:
    return compare({each["worker"]: _answer(each) for each in told["results"]}).told()


def _answer(entry: Mapping[str, Any]) -> WorkerAnswer:
    status, body = entry.get("status_code"), entry.get("body")
    return WorkerAnswer(entry["worker"], status, body, entry.get("error", ""))


_SHOWN: Final = {
    "status": _status,
    "pause": _broadcast,
    "continue": _broadcast,
    "checksum": _checksums,
    "resolve": _resolved,
}
