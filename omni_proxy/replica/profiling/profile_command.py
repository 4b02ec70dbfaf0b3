"""`omni-proxy replica profile SOURCE`: a report of recorded events, as table, JSON or HTML page.

Exit status 0, also if invalid lines were skipped, which are reported on stderr. 1: the output can't
be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_proxy.replica.profiling.report import build_report, read_events, render_page, render_table


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    events = read_events(arguments.source, _print_error)
    summary = build_report(events)
    if arguments.format == "json":
        text = json.dumps(summary, indent=2)
    elif arguments.format == "html":
        text = render_page(summary, str(arguments.source))
    else:
        text = render_table(summary)
    if arguments.out == "-":
        sys.stdout.write(text + "\n")
        return 0
    try:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        _print_error(f"cannot write {arguments.out}: {error.strerror}")
        return 1
    _print_error(f"{summary['request_count']} requests written to {arguments.out}")
    return 0


def _print_error(text: str) -> None:
    sys.stderr.write(f"omni-proxy replica profile: {text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-proxy replica profile",
        description="Where the time of recorded requests went: by stage and by hop.",
        epilog="Events are recorded between POST /start_request_profile and /stop_request_profile "
        "of a replica.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="SOURCE", type=Path, help="a file of events, or a folder of such files"
    )
    parser.add_argument("--format", choices=["table", "json", "html"], default="table")
    parser.add_argument("--out", metavar="PATH", default="-", help="a file; - is stdout (default)")
    return parser
