"""`omni-proxy weights ...`: how the weights behind a running proxy stand, and operations on them.

Asks the proxy over HTTP and changes nothing by itself. Exit status 0: done; 1: the proxy or a
worker said no, or replicas differ; 2: it could not be asked like that; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Final

from omni_proxy.cli.finding import (
    NO_SUCH_PLACE,
    Answer,
    CannotAsk,
    Proxy,
    add_place,
    place_of,
    with_command,
)
from omni_proxy.cli.fleet_changes import Refused, accepted
from omni_proxy.cli.meanwhile import agrees, answered
from omni_proxy.cli.strangers import Parser
from omni_proxy.cli.tables import plain
from omni_proxy.cli.versions import called, meant, question
from omni_proxy.cli.weight_words import SHOWN, answered_words, compared

WAIT_SECS: Final = 1200.0  # longer than the proxy itself may wait for its turn and its workers
COMMANDS: Final = {
    "status": "what runs, which version every worker has, who is uncertain (the default)",
    "pause": "stop generation on every worker",
    "continue": "let every worker generate again",
    "checksum": "compare the weights of all workers; they stop while they compute",
    "resolve": "bring uncertain workers back: you have verified their weights",
    "versions": "the versions that the proxy keeps, the newest first",
    "rollback": "give all workers a version that is kept",
}
ROLLBACK: Final = "/weights/rollback"
SELECTING: Final = ("pause", "continue", "checksum")
# What only looks, and where.
ASKED: Final = {"status": "/weights", "versions": "/weights/versions"}
REFUSED: Final = 1
INTERRUPTED: Final = 130
HISTORYSHOWN: Final = 5


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="omni-proxy weights",
        description="Look at the weights of a running proxy's workers, and operate on them.",
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_place(one)
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
    return made


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(with_command(argv, "status"))
    try:
        with Proxy(place_of(arguments), WAIT_SECS) as proxy:
            answer = _ask(proxy, arguments)
    except CannotAsk as why:
        print(f"omni-proxy weights: {why}", file=sys.stderr)
        return NO_SUCH_PLACE
    except Refused as why:
        print(f"omni-proxy weights: {why}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("not waited for any longer; what was asked for goes on", file=sys.stderr)
        return INTERRUPTED
    return _tell(answer, arguments)


def _ask(proxy: Proxy, arguments: argparse.Namespace) -> Answer:
    """Raises CannotAsk, Refused."""
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
    with Proxy(proxy.place) as beside:
        return answered(
            lambda: proxy.send("POST", path, body, query),
            lambda: "" if arguments.json else _how_far(beside, path),
        )


def _agreed(proxy: Proxy, arguments: argparse.Namespace) -> int:
    """The number of the version that is meant. Raises CannotAsk, Refused."""
    version = meant(accepted(proxy.get(ASKED["versions"])).told, arguments.version)
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise CannotAsk(
                f"it would give {called(version)} to all workers, and nobody is here to agree: "
                "say --yes"
            )
        if not agrees(question(version)):
            raise Refused("nothing was changed")
    return int(version["number"])


def _how_far(proxy: Proxy, path: str) -> str:
    """Of the call to `path`, as far as the proxy tells."""
    try:
        running = proxy.get(ASKED["status"]).told.get("operation")
    except CannotAsk:
        return ""
    if not isinstance(running, dict):
        return ""
    behind = "" if running["path"] == path else f"waiting for {plain(running['path'])}: "
    return f"{behind}{plain(running['step'])}, {answered_words(running)}"


def _tell(answer: Answer, arguments: argparse.Namespace) -> int:
    told = answer.told
    verdict = compared(told) if arguments.command == "checksum" and "results" in told else None
    if arguments.json:
        print(json.dumps(told, indent=2))
    elif isinstance(told.get("error"), dict):
        print(f"status {answer.status}: {plain(answer.refusal)}", file=sys.stderr)
    else:
        print("\n".join(SHOWN[arguments.command](told)))
    well = answer.status < 400 and not (verdict and verdict["mismatched"])
    return 0 if well else 1
