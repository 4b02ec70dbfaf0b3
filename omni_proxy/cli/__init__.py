"""From the words of the command line to an exit status: 0 fine, 2 refused before anything ran.

The first word picks the command; without one of these words it is `serve`. Commands are imported
when they run: `omni-proxy check` must not wait for a model runtime.
"""

import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

MISUNDERSTOOD: Final = 2
READER_LEFT: Final = 141  # as of a program that SIGPIPE ended
INTERRUPTED: Final = 130  # likewise by SIGINT
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

STREAMS: Final = {"stdin": "r", "stdout": "w", "stderr": "w"}  # their place is their number
# What the program and its completion scripts start; nobody else has a use for it.
INNER: Final = {
    "__complete": "omni_proxy.cli.complete",
    "data-plane-process": "omni_proxy.multiprocess.dataplane_process",
    "receiver-process": "omni_proxy.process_group.fork.receiver_process",
    "router-process": "omni_proxy.compat.router_process",
}


def main(argv: Sequence[str] | None = None) -> int:
    _open_what_is_closed()
    _show_what_can_be_shown()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    known = COMMANDS | INNER
    if words and words[0] not in known and not words[0].startswith("-"):
        print(f"omni-proxy: {_no_command(words[0])}", file=sys.stderr)
        return MISUNDERSTOOD
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
    except KeyboardInterrupt:  # who pressed Ctrl-C wants no trace of what it met
        return INTERRUPTED
    return status


def _open_what_is_closed() -> None:
    """Of the standard streams (`>&-`): a socket would get its number, and what we print."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(STREAMS):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for descriptor, (name, mode) in enumerate(STREAMS.items()):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _show_what_can_be_shown() -> None:
    """In a locale that lacks our dashes and bars, or the letters of a model, they are `?`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _no_command(word: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(word, COMMANDS, n=2)
    meant = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(COMMANDS)}"
    if word.endswith(".toml"):
        meant = f"a file is named by --config {word}"
    return f'unknown command "{word}"; {meant} (omni-proxy --help tells more)'
