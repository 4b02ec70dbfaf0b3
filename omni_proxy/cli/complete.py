"""`omni-proxy __complete LINE`: the running proxy's workers that may come next, for the shells.

The completion scripts call it at a press of TAB, with the command line up to the cursor. Contract:
a name per line, and nothing where no proxy answers in time; exit status 0, and no other output.
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

ANSWER_SECS: Final = 1.0  # whoever presses TAB waits for it
COMMAND: Final = "workers"
# Whatever else is in a name could mean something to a shell.
_HARMLESS: Final = re.compile(r"[A-Za-z0-9._~:/@%\[\]-]+")


def main(argv: Sequence[str]) -> int:
    line = argv[0] if argv else ""
    with contextlib.redirect_stderr(io.StringIO()):  # what it says would stand in the typed line
        try:
            found = list(_names(line))
        except (AdminClientError, ChangeRefused, argparse.ArgumentError, OSError, ValueError):
            found = []
    sys.stdout.writelines(f"{name}\n" for name in found)
    return 0


def _names(line: str) -> Iterator[str]:
    """Of the workers that LINE does not name yet, as far as they begin with its last word.

    Raises AdminClientError, ChangeRefused; ValueError for a quote that is open, ArgumentError,
    OSError.
    """
    words = [os.path.expandvars(os.path.expanduser(word)) for word in shlex.split(line)]
    typed = words.pop() if words and not line[-1:].isspace() else ""
    words = words[words.index(COMMAND) + 1 :]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_target_arguments(parser)
    place, others = parser.parse_known_args(words)
    with AdminClient(admin_target_of(place), ANSWER_SECS) as proxy:
        fleet = fetch_workers(proxy)
    for record in fleet:
        names = _names_of(record)
        if not any(name in others for name in names):
            yield from [name for name in names if name.startswith(typed)][:1]


def _names_of(record: JsonObject) -> list[str]:
    """HOST:PORT first: that is shorter, and no two workers share it."""
    told = [str(record.get(key) or "") for key in ("display_id", "url")]
    return [name for name in told if _HARMLESS.fullmatch(name)]
