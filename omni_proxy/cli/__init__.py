"""From the words of the command line to an exit status: 0 fine, 2 refused before anything ran.

The first word picks the command; without one of these words it is `serve`. Commands are imported
when they run: `omni-proxy check` must not wait for a model runtime.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

READER_LEFT: Final = 141  # as of a program that SIGPIPE ended
# A command's word, then where it is done: its module and, where that isn't `main`, the function.
COMMANDS: Final = {
    "check": "omni_proxy.cli.check",
    "completion": "omni_proxy.cli.completion",
    "explain": "omni_proxy.cli.explain",
    "launch": "omni_proxy.cli.launch",
    "launch-router": "omni_proxy.cli.launch:main_router",
    "logs": "omni_proxy.cli.logs",
    "replica": "omni_proxy.replica.command",
    "serve": "omni_proxy.cli.serve",
    "status": "omni_proxy.cli.status",
    "top": "omni_proxy.cli.top.command",
    "weights": "omni_proxy.cli.weights",
    "workers": "omni_proxy.cli.workers",
}

# What the program starts of itself; nobody else has a use for it.
INNER: Final = {
    "door-process": "omni_proxy.doors.process",
    "receiver-process": "omni_proxy.collective.child",
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    known = COMMANDS | INNER
    command = words.pop(0) if words and words[0] in known else "serve"
    module, _, function = known[command].partition(":")
    found = getattr(importlib.import_module(module), function or "main")
    try:
        status = cast("Callable[[Sequence[str]], int]", found)(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has enough (`| head`); the interpreter would try to write the rest once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    return status
