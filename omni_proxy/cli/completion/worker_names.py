"""`omni-proxy __complete LINE`: workers of the running proxy, for completion scripts.

The shell runs it on TAB, with the command line up to the cursor. Contract: one name per line, none
if no proxy answers in time; exit status 0, and no other output.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from omni_proxy.cli.client.admin_client import (
    AdminClient,
    AdminClientError,
    JsonObject,
    add_target_arguments,
    admin_target_of,
)
from omni_proxy.cli.client.worker_changes import ChangeRefused, fetch_workers

ANSWER_SECS: Final = 1.0  # the user waits after TAB
COMMAND: Final = "workers"
# Other characters could be special to a shell.
_HARMLESS: Final = re.compile(r"[A-Za-z0-9._~:/@%\[\]-]+")


def main(argv: Sequence[str]) -> int:
    line = argv[0] if argv else ""
    with contextlib.redirect_stderr(io.StringIO()):  # a message would appear in the typed line
        try:
            names = list(_names(line))
        except (AdminClientError, ChangeRefused, argparse.ArgumentError, OSError, ValueError):
            names = []
    sys.stdout.writelines(f"{name}\n" for name in names)
    return 0


def _names(line: str) -> Iterator[str]:
    """Names of workers that LINE does not contain yet and that begin with its last word.

    Raises AdminClientError, ChangeRefused, ArgumentError, OSError; ValueError for an open quote.
    """
    args = [os.path.expandvars(os.path.expanduser(arg)) for arg in shlex.split(line)]
    typed = args.pop() if args and not line[-1:].isspace() else ""
    args = args[args.index(COMMAND) + 1 :]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_target_arguments(parser)
    target, typed_workers = parser.parse_known_args(args)
    with AdminClient(admin_target_of(target), ANSWER_SECS) as proxy:
        fleet = fetch_workers(proxy)
    for record in fleet:
        names = _names_of(record)
        if not any(name in typed_workers for name in names):
            yield from [name for name in names if name.startswith(typed)][:1]


def _names_of(record: JsonObject) -> list[str]:
    """HOST:PORT first: it is shorter and unique."""
    names = [str(record.get(key) or "") for key in ("display_id", "url")]
    return [name for name in names if _HARMLESS.fullmatch(name)]
