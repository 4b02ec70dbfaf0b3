"""`omni-proxy completion SHELL`: a completion script, generated from the argument parsers.

Invariant: every flag of a command is completed; no list of flags is written twice. Workers of a
running proxy are completed through `omni-proxy __complete`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Literal, get_args, get_origin, get_type_hints

from omni_proxy.cli import COMMANDS
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.cli.flags.completion_scripts import SHELLS, Flag, Page
from omni_proxy.config.fields import POLICIES
from omni_proxy.config.schema import Config

_EPILOG: Final = """\
bash: omni-proxy completion bash > ~/.local/share/bash-completion/completions/omni-proxy
zsh:  omni-proxy completion zsh > "${fpath[1]}/_omni-proxy"
fish: omni-proxy completion fish > ~/.config/fish/completions/omni-proxy.fish
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy completion",
        description="Print a shell completion script for omni-proxy's commands and flags.",
        epilog=_EPILOG,
    )
    result.add_argument("shell", choices=sorted(SHELLS))
    return result


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    sys.stdout.write(SHELLS[arguments.shell](pages()))
    return 0


def pages() -> list[Page]:
    """One page of completions per command; the first page is for an empty command line."""
    listed: list[Page] = []
    for name, subparser in _parsers():
        listed += _pages(name, subparser)
    by_name = {page.name: page for page in listed}
    first = [name for name in COMMANDS if name in by_name]
    serving = by_name["serve"]
    return [
        Page("", serving.about, serving.flags, (*first, *serving.words), serving.files),
        *listed,
    ]


def _parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    # Imported here: no other command must wait for all of them.
    from omni_proxy.cli import explain, status, weights, workers
    from omni_proxy.cli.bench import arguments as bench
    from omni_proxy.cli.client import upgrade
    from omni_proxy.cli.config_file import init, keys, schema
    from omni_proxy.cli.flags import arguments
    from omni_proxy.cli.flags.engines import ENGINES
    from omni_proxy.cli.logs import command as logs
    from omni_proxy.cli.logs import trace
    from omni_proxy.cli.simulate import arguments as simulate
    from omni_proxy.cli.top import command as top
    from omni_proxy.replica import command as replica
    from omni_proxy.replica.profiling import report as profile

    yield "serve", arguments.serve_parser()
    yield "init", init.parser()
    yield "check", arguments.check_parser()
    yield "schema", schema.parser()
    yield "keys", keys.parser()
    yield "status", status.parser()
    yield "top", top.parser()
    yield "workers", workers.parser()
    yield "explain", explain.parser()
    yield "logs", logs.parser()
    yield "trace", trace.parser()
    yield "weights", weights.parser()
    yield "simulate", simulate.parser()
    yield "bench", bench.parser()
    yield "launch", arguments.launch_parser(tuple(ENGINES))
    yield "launch-router", arguments.router_parser()
    yield "picker", arguments.picker_parser()
    yield "replica", replica.serve_parser()
    yield "replica fetch", replica.fetch_parser()
    yield "replica profile", profile._parser()
    yield "upgrade", upgrade.parser()
    yield "completion", parser()


def _pages(name: str, subparser: argparse.ArgumentParser) -> Iterator[Page]:
    """A page per subcommand; the first subcommand is the default, so its flags are offered too."""
    values: list[str] = ["fetch", "profile"] if name == "replica" else []
    flags: list[Flag] = []
    files = workers = False
    for action in subparser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = [
                page
                for command in action.choices
                for page in _pages(command, action.choices[command])
            ]
            yield from (replace(page, name=f"{name} {page.name}") for page in below)
            flags += (flag for flag in below[0].flags if "--help" not in flag.names)
        if action.help == argparse.SUPPRESS:
            continue
        if action.option_strings:
            flags.append(_flag(action))
        elif action.choices:
            values += map(str, action.choices)
        else:
            files = files or _is_file(action)
            workers = workers or action.metavar == "WORKER"
    about = (subparser.description or "").partition("\n")[0]
    yield Page(name, about, tuple(flags), tuple(values), files, workers)


def _flag(action: argparse.Action) -> Flag:
    takes = action.nargs != 0
    choices = tuple(map(str, action.choices or ())) or _values_of(action.dest)
    about = (action.help or "") % {"default": action.default, "prog": "omni-proxy"}
    return Flag(tuple(action.option_strings), about, takes, choices, takes and _is_file(action))


def _values_of(key: str) -> tuple[str, ...]:
    """The values of a flag, if it sets a configuration key with a fixed list of values."""
    if key.rpartition(".")[2] in ("policy", "policies", "prefill_policy", "decode_policy"):
        return POLICIES
    if key == "kv_connector":
        return ("nixl", "mooncake")  # of vLLM engines, see `--help`
    table, _, name = key.partition(".")
    kind: object = Config
    for step in (table, name):
        hints = get_type_hints(kind) if isinstance(kind, type) else {}
        kind = hints.get(step)
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def _is_file(action: argparse.Action) -> bool:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    return metavar.upper() in ("FILE", "PATH", "DIR") and action.dest != "path"
