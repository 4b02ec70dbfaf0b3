"""`omni-proxy trace ID`: prints the route-log lines of a trace or a request.

Exit status 0: found; 1: nothing found, or no log to read; 2: no proxy could be reached, or a usage
error. Invariant: the log is read once from its start, line by line, in constant memory; its content
never raises and never reaches the terminal as control characters.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_proxy.cli.client.admin_client import (
    EXIT_NOT_REACHABLE,
    AdminClientError,
    add_target_arguments,
)
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.cli.logs.command import NO_LOG, NoLogError, log_file, raw_line
from omni_proxy.cli.terminal_text import printable

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_EPILOG: Final = """\
examples:
  omni-proxy trace 4bf92f3577b34da6a3ce929d0e0e4736 --config proxy.toml
  omni-proxy trace chatcmpl-17 --file route.log --json
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy trace",
        description="Print the route-log lines of a trace or a request, from a proxy on this "
        "machine: time, worker, outcome and durations.",
        epilog=_EPILOG,
    )
    result.add_argument(
        "id", metavar="ID", help="a trace id, a whole traceparent, or the id of a request"
    )
    result.add_argument("--json", action="store_true", help="print the lines unchanged")
    result.add_argument(
        "--file", metavar="PATH", type=Path, help="read this log; no proxy is contacted"
    )
    add_target_arguments(result)
    return result


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    arguments.route = True
    whole = _TRACEPARENT.fullmatch(arguments.id)
    wanted = whole[1] if whole else arguments.id
    count = 0
    try:
        path = arguments.file or log_file(arguments)
        for line, record in _found(path, wanted):
            print(raw_line(line) if arguments.json else ("\n" if count else "") + _shown(record))
            count += 1
    except AdminClientError as error:
        print(f"omni-proxy trace: {error}", file=sys.stderr)
        return EXIT_NOT_REACHABLE
    except NoLogError as error:
        print(f"omni-proxy trace: {error}", file=sys.stderr)
        return NO_LOG
    if count:
        return 0
    print(
        f"omni-proxy trace: {path} has no request with the trace or id {printable(wanted)}: it "
        "has not ended yet, was not sampled, or is in a rotated log, which --file PATH reads",
        file=sys.stderr,
    )
    return NO_LOG


def _found(path: Path, wanted: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Raises NoLogError."""
    needle = json.dumps(wanted)[1:-1].encode()
    try:
        with path.open("rb") as file:
            for line in file:
                if needle not in line:
                    continue
                record = _parsed(line)
                if wanted in (record.get("trace_id"), record.get("request_id")):
                    yield line.rstrip(b"\n"), record
    except OSError as error:
        raise NoLogError(
            f"{path}: {error.strerror}: does the proxy run on this machine, and has it written "
            "anything yet? Use --file PATH for a copied log"
        ) from None


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError):
        return {}
    return record if isinstance(record, dict) else {}


def _shown(record: dict[str, Any]) -> str:
    """One field per line, without fields that have no value."""
    fields = {name: value for name, value in record.items() if value not in (None, "", [])}
    width = max(map(len, fields), default=0)
    return "\n".join(
        f"{printable(name):<{width}}  {printable(_text(value))}" for name, value in fields.items()
    )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
