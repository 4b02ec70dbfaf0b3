"""`omni-proxy completion SHELL`: a completion script for bash, zsh or fish, generated from the
argument parsers; and `omni-proxy __complete LINE`, with which scripts complete workers of the
running proxy.

Invariant: every flag of a command is completed; no list of flags is written twice. All three
scripts work alike: the words so far select a page, which lists the completions; every word is
quoted. The shell runs `__complete` on TAB, with the command line up to the cursor. Contract: one
name per line, none if no proxy answers in time; exit status 0, and no other output.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args, get_origin, get_type_hints

from omni_proxy.cli import COMMANDS
from omni_proxy.cli.client.admin_client import (
    AdminClient,
    AdminClientError,
    JsonObject,
    add_target_arguments,
    admin_target_of,
)
from omni_proxy.cli.client.worker_changes import ChangeRefused, fetch_workers
from omni_proxy.cli.flags.command_parser import CommandParser
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
    from omni_proxy.cli import explain, keys, logs, simulate, status, upgrade, workers
    from omni_proxy.cli.bench import command as bench
    from omni_proxy.cli.config_file import init, schema
    from omni_proxy.cli.flags import start_parsers
    from omni_proxy.cli.flags.engine_commands import ENGINES
    from omni_proxy.cli.top import command as top
    from omni_proxy.cli.weights import command as weights
    from omni_proxy.replica import profile_report as profile
    from omni_proxy.replica import replica_command as replica

    yield "serve", start_parsers.serve_parser()
    yield "init", init.parser()
    yield "check", start_parsers.check_parser()
    yield "schema", schema.parser()
    yield "keys", keys.parser()
    yield "status", status.parser()
    yield "top", top.parser()
    yield "workers", workers.parser()
    yield "explain", explain.parser()
    yield "logs", logs.parser()
    yield "trace", logs.trace_parser()
    yield "weights", weights.parser()
    yield "simulate", simulate.parser()
    yield "bench", bench.parser()
    yield "launch", start_parsers.launch_parser(tuple(ENGINES))
    yield "launch-router", start_parsers.router_parser()
    yield "picker", start_parsers.picker_parser()
    yield "replica", replica.serve_parser()
    yield "replica fetch", replica.fetch_parser()
    yield "replica profile", profile.parser()
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


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]
    about: str
    takes: bool  # whether it takes a value
    choices: tuple[str, ...] = ()
    file: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """Completions after the command of this name, as in "workers add"; "" before a command."""

    name: str
    about: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...] = ()
    files: bool = False
    workers: bool = False  # of the running proxy


_BASH_WORKERS: Final = """\
_omni_proxy_workers() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$'\\n' typed before=""
    typed=${line##* }
    # If a colon ends a word, bash replaces only the text after the last colon.
    [[ $COMP_WORDBREAKS == *:* ]] && before=${typed%"${typed##*:}"}
    COMPREPLY=($("${1/#\\~/$HOME}" __complete "$line" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    compopt +o filenames 2>/dev/null
    (( ${#COMPREPLY[@]} ))
}
"""
_ZSH_WORKERS: Final = """\
_omni_proxy_workers() {
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    local -a found=(${(f)"$(_call_program workers $words[1] __complete ${(q)line} 2>/dev/null)"})
    (( $#found )) && compadd -- $found
}
"""
_FISH_WORKERS: Final = """\
function __omni_proxy_workers
    set -l words (commandline -opc)
    $words[1] __complete (commandline -cp) 2>/dev/null
end
"""


def bash(pages: Sequence[Page]) -> str:
    lines = [
        "# omni-proxy for bash: source this, or put it where bash-completion looks.",
        _BASH_WORKERS + "_omni_proxy() {",
        '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} page="" words=""',
        *_page_lines("${COMP_WORDS[at]}", pages),
        "    COMPREPLY=()",
        '    case "$page:$prev" in',
        *(f"        {line}" for line in _bash_values(pages)),
        "    esac",
        '    case "$page" in',
    ]
    for page in pages:
        files = ' [[ $cur == -* ]] || COMPREPLY=($(compgen -f -- "$cur"));' if page.files else ""
        if page.workers:
            files = ' [[ $cur != -* ]] && _omni_proxy_workers "$1" && return 0;'
        lines.append(f"        {_quoted(page.name)}) words={_quoted(_all(page))};{files} ;;")
    lines += [
        "    esac",
        '    COMPREPLY+=($(compgen -W "$words" -- "$cur")) || return 0',
        "}",
        "complete -o filenames -F _omni_proxy omni-proxy",
    ]
    return "\n".join(lines) + "\n"


def _page_lines(word: str, pages: Sequence[Page]) -> Iterator[str]:
    """Shell lines that set $page to the page's name; `word` is the shell's word number $at.

    A word counts once the next one has begun. Flags may precede the second name, and bash splits a
    URL into several words: words that are neither a name nor a flag's value are skipped.
    """
    one, two, valued = ("|".join(map(_quoted, names or [""])) for names in _names(pages))
    yield "    local at=1"
    yield f'    (( COMP_CWORD > 1 )) && case "{word}" in {one}) page="{word}" ;; esac'
    yield "    for (( at = 2; at < COMP_CWORD; at++ )); do"
    yield f'        case "$page:{word}" in {valued}) (( at++ )); continue ;; esac'
    yield f'        case "$page {word}" in {two}) page="$page {word}"; break ;; esac'
    yield "    done"


def _names(pages: Sequence[Page]) -> tuple[list[str], list[str], list[str]]:
    """Names of one word, of two words, and PAGE:FLAG for flags with a value between the two."""
    two = [page.name for page in pages if " " in page.name]
    groups = {name.partition(" ")[0] for name in two}
    valued = [
        f"{page.name}:{name}"
        for page in pages
        if page.name in groups
        for flag in page.flags
        if flag.takes
        for name in flag.names
    ]
    return [page.name for page in pages if page.name and " " not in page.name], two, valued


def _bash_values(pages: Sequence[Page]) -> Iterator[str]:
    for page in pages:
        for flag in page.flags:
            if not flag.takes:
                continue
            pattern = "|".join(_quoted(f"{page.name}:{name}") for name in flag.names)
            reply = ""
            if flag.choices:
                reply = f' COMPREPLY=($(compgen -W {_quoted(" ".join(flag.choices))} -- "$cur"));'
            elif flag.file:
                reply = ' COMPREPLY=($(compgen -f -- "$cur"));'
            yield f"{pattern}){reply} return ;;"


def zsh(pages: Sequence[Page]) -> str:
    lines = [
        "#compdef omni-proxy",
        "# omni-proxy for zsh: as _omni-proxy in a folder of $fpath.",
        _ZSH_WORKERS + "_omni_proxy() {",
        '    local page="" prev=$words[CURRENT-1] COMP_CWORD=$((CURRENT-1))',
        "    local -a found",
        *_page_lines("$words[at+1]", pages),
        '    case "$page:$prev" in',
    ]
    for page in pages:
        for flag in (flag for flag in page.flags if flag.takes):
            pattern = "|".join(_quoted(f"{page.name}:{name}") for name in flag.names)
            reply = f"compadd -- {_join_quoted(flag.choices)}" if flag.choices else ":"
            lines.append(f"        {pattern}) {'_files' if flag.file else reply}; return ;;")
    lines += ["    esac", '    case "$page" in']
    for page in pages:
        described = [
            f"{_colons(name)}:{_brief(flag.about)}" for flag in page.flags for name in flag.names
        ]
        files = " [[ $PREFIX == -* ]] || _files;" if page.files else ""
        if page.workers:
            files = " [[ $PREFIX == -* ]] || _omni_proxy_workers;"
        lines.append(f"        {_quoted(page.name)})")
        lines.append(f"            found=({_join_quoted(page.words)})")
        lines.append("            (( $#found )) && compadd -- $found")
        lines.append(f"            found=({_join_quoted(described)})")
        lines.append(f"            [[ $PREFIX == -* ]] && _describe flag found;{files} ;;")
    lines += [
        "    esac",
        "}",
        # Run if autoloaded from $fpath; registered if sourced.
        'if [[ $funcstack[1] == _omni-proxy ]]; then _omni_proxy "$@"',
        "else compdef _omni_proxy omni-proxy; fi",
    ]
    return "\n".join(lines) + "\n"


def fish(pages: Sequence[Page]) -> str:
    one, two, valued = map(_join_quoted, _names(pages))
    lines = [
        "# omni-proxy for fish: in ~/.config/fish/completions/omni-proxy.fish",
        _FISH_WORKERS + "function __omni_proxy_page",
        "    set -l words (commandline -opc)",
        '    set -l page ""',
        f'    contains -- "$words[2]" {one}; and set page "$words[2]"',
        "    set -l at 0",
        "    set -l value 0",
        "    for word in $words",
        "        set at (math $at + 1)",
        "        test $at -lt 3; and continue",
        "        if test $value = 1; set value 0; continue; end",
        f'        contains -- "$page:$word" {valued}; and set value 1',
        f'        contains -- "$page $word" {two}; and set page "$page $word"; and break',
        "    end",
        '    test "$page" = "$argv[1]"',
        "end",
        "complete -c omni-proxy -f",
    ]
    for page in pages:
        prefix = f"complete -c omni-proxy -n {_quoted(f'__omni_proxy_page {_quoted(page.name)}')}"
        if page.words:
            lines.append(f"{prefix} -a {_quoted(' '.join(page.words))}")
        if page.files:
            lines.append(f"{prefix} -F")
        if page.workers:
            lines.append(f"{prefix} -a '(__omni_proxy_workers)'")
        for flag in page.flags:
            value = " -x" if flag.takes else ""
            if flag.choices:
                value += f" -a {_quoted(' '.join(flag.choices))}"
            if flag.file:
                value = " -r -F"
            for name in flag.names:
                kind = "-l" if name.startswith("--") else "-s"
                option = _quoted(name.lstrip("-"))
                lines.append(f"{prefix} {kind} {option}{value} -d {_quoted(_brief(flag.about))}")
    return "\n".join(lines) + "\n"


def _all(page: Page) -> str:
    return " ".join((*page.words, *(name for flag in page.flags for name in flag.names)))


def _join_quoted(words: Sequence[str]) -> str:
    return " ".join(map(_quoted, words))


def _quoted(text: str) -> str:
    """The text in single quotes, valid in all three shells."""
    return "'" + text.replace("\\", "").replace("'", "'\\''") + "'"


def _colons(text: str) -> str:
    return text.replace(":", "\\:")


def _brief(about: str) -> str:
    return re.split(r"[;(]", about)[0].strip()


SHELLS: Final[dict[str, Callable[[Sequence[Page]], str]]] = {
    "bash": bash,
    "fish": fish,
    "zsh": zsh,
}


ANSWER_SECS: Final = 1.0  # the user waits after TAB
COMMAND: Final = "workers"
# Other characters could be special to a shell.
_HARMLESS: Final = re.compile(r"[A-Za-z0-9._~:/@%\[\]-]+")


def main_worker_names(argv: Sequence[str]) -> int:
    line = argv[0] if argv else ""
    with contextlib.redirect_stderr(io.StringIO()):  # a message would appear in the typed line
        try:
            names = list(_worker_names(line))
        except (AdminClientError, ChangeRefused, argparse.ArgumentError, OSError, ValueError):
            names = []
    sys.stdout.writelines(f"{name}\n" for name in names)
    return 0


def _worker_names(line: str) -> Iterator[str]:
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
