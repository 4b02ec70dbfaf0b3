"""Dispatches a command line to its command. Exit status 0: success; 2: usage error, nothing ran.

The first argument selects the command; the default is `serve`. A command's module is imported when
it runs: `omni-proxy check` must not wait for a model runtime. Imports point down only; the layers,
top to bottom: completion; the other commands; screen; client; flags, terminal_text.
"""

import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

EXIT_USAGE_ERROR: Final = 2
EXIT_BROKEN_PIPE: Final = 141  # 128 + SIGPIPE
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT
# Command name to module, and the function if it is not `main`.
COMMANDS: Final = {
    "bench": "omni_proxy.cli.bench.command",
    "check": "omni_proxy.cli.config_file.check",
    "completion": "omni_proxy.cli.completion",
    "explain": "omni_proxy.cli.explain",
    "init": "omni_proxy.cli.config_file.init",
    "keys": "omni_proxy.cli.keys",
    "launch": "omni_proxy.cli.launch",
    "launch-router": "omni_proxy.cli.launch:main_router",
    "logs": "omni_proxy.cli.logs",
    "picker": "omni_proxy.cli.serve:main_picker",
    "replica": "omni_proxy.replica.replica_command",
    "schema": "omni_proxy.cli.config_file.schema",
    "serve": "omni_proxy.cli.serve",
    "simulate": "omni_proxy.cli.simulate",
    "status": "omni_proxy.cli.status",
    "top": "omni_proxy.cli.top.command",
    "trace": "omni_proxy.cli.logs:main_trace",
    "upgrade": "omni_proxy.cli.upgrade",
    "weights": "omni_proxy.cli.weights.command",
    "workers": "omni_proxy.cli.workers",
}

STREAMS: Final = {"stdin": "r", "stdout": "w", "stderr": "w"}  # in the order of their descriptors
# Internal commands: started by the program itself and by completion scripts.
INNER: Final = {
    "__complete": "omni_proxy.cli.completion:main_worker_names",
    "data-plane-process": "omni_proxy.multiprocess.dataplane_process",
    "kv-events-process": "omni_proxy.kv_events.subscriber_process",
    "receiver-process": "omni_proxy.process_group.fork.receiver_process",
    "router-process": "omni_proxy.compat.start_router",
}


def main(argv: Sequence[str] | None = None) -> int:
    _open_closed_streams()
    _replace_unprintable()
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    commands = COMMANDS | INNER
    if args and args[0] not in commands and not args[0].startswith("-"):
        print(f"omni-proxy: {_unknown_command(args[0])}", file=sys.stderr)
        return EXIT_USAGE_ERROR
    command = args.pop(0) if args and args[0] in commands else "serve"
    module, _, function = commands[command].partition(":")
    run = getattr(importlib.import_module(module), function or "main")
    try:
        status = cast("Callable[[Sequence[str]], int]", run)(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe (`| head`); the interpreter would flush the rest again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:  # Ctrl-C: no traceback
        return EXIT_INTERRUPTED
    return status


def _open_closed_streams() -> None:
    """Open standard streams that are closed (`>&-`). Otherwise a socket would get the descriptor,
    and printed text would go to its peer."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(STREAMS):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for descriptor, (name, mode) in enumerate(STREAMS.items()):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _replace_unprintable() -> None:
    """Print characters that the locale's encoding lacks as `?`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _unknown_command(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, COMMANDS, n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else f"commands: {', '.join(COMMANDS)}"
    if name.endswith(".toml"):
        hint = f"pass a file with --config {name}"
    return f'unknown command "{name}"; {hint} (see omni-proxy --help)'
