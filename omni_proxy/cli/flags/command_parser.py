"""The argument parser of every command, argument types for numbers, and hints for unknown flags.

Invariant: an unknown flag is refused, with a hint if it has a likely counterpart: another name, the
reason why it is missing, or the nearest flag. A wrong hint is worse than none. Pure: bad input
raises ArgumentTypeError with a text for the user.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

from omni_proxy.cli.flags.other_router_flags import (
    PAGE,
    WITHOUT_EFFECT,
    explain_missing_flag,
    strip_router_prefix,
)
from omni_proxy.config.problem import did_you_mean

_UNKNOWN: Final = "unrecognized arguments: "
THEIRS: Final = {
    "--backend": "--engine of omni-proxy launch",
    "--ca-cert-path": "tls_ca in [[workers]], or tls_worker_ca in [server]",
    "--ca-cert-paths": "tls_ca in [[workers]], or tls_worker_ca in [server]",
    "--check-config": "omni-proxy check FILE",
    "--launcher-config": "[[launch]] in the file, or omni-proxy launch",
    "--max-connections": "--max-inflight N",
    "--router-processes": "processes in [server]",
    "--router-state-dir": "state_file in [server]",
    "--shutdown-drain-secs": "drain_timeout_secs in [server]",
    "--spill-abs-threshold": 'spill = "chosen" in [routing.cache_aware]',
    "--spill-rel-threshold": 'spill = "chosen" in [routing.cache_aware]',
    "--worker-config": "[[workers]] in the file",
}
_CHOICE: Final = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
FLAG_CUTOFF: Final = 0.8  # share of common letters; unrelated flags share many


class _HelpFormatter(argparse.HelpFormatter):
    """A text with line breaks stays as it is written; any other is wrapped."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


class CommandParser(argparse.ArgumentParser):
    """The parser of a command: exact flags only, hints for unknown ones, and one line of usage
    above an error. Subcommands get the same class. `options` are those of ArgumentParser."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation would break when a second flag begins with it.
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix(_UNKNOWN).split() if message.startswith(_UNKNOWN) else []
        hints = [*_hints_for_flags(unknown, _options(self)), *_hints_for_choices(message)]
        lines = "\n  ".join((message, *hints))
        self.exit(2, f"{self._usage_line()}{self.prog}: error: {lines}\n")

    def _usage_line(self) -> str:
        """The usage line of --help, without the flags."""
        places = [action for action in self._actions if not action.option_strings]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, places, [])
        line = " ".join(formatter.format_help().split())
        flags = len(places) + 1 < len(self._actions) and self.usage is None
        prefix = f"usage: {self.prog}"
        more = f" ({self.prog} --help)" if self.add_help else ""
        return f"{prefix}{' [FLAGS]' if flags else ''}{line.removeprefix(prefix)}{more}\n"


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """The flags of the parser and of its subcommands."""
    names: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names += (name for below in action.choices.values() for name in _options(below))
        elif action.help != argparse.SUPPRESS:
            names += action.option_strings
    return list(dict.fromkeys(names))


def _hints_for_choices(message: str) -> list[str]:
    """Hints for a wrong choice."""
    match = _CHOICE.search(message)
    if match is None:
        return []
    hint = did_you_mean(match[1], re.findall(r"'([^']*)'", match[2]))
    return [hint] if hint else []


def _hints_for_flags(unknown: Iterable[str], options: Sequence[str]) -> list[str]:
    """A line for each unknown flag that has a likely counterpart."""
    cures = []
    absent: dict[str, list[str]] = {}
    for flag in dict.fromkeys(arg.partition("=")[0] for arg in unknown if arg.startswith("--")):
        unprefixed = strip_router_prefix(flag)
        if replacement := THEIRS.get(flag) or THEIRS.get(unprefixed):
            cures.append(f"{flag}: use {replacement} ({PAGE})")
        elif missing := explain_missing_flag(flag):
            absent.setdefault(missing, []).append(flag)
        elif unprefixed in WITHOUT_EFFECT:
            cures.append(f"{flag}: omni-proxy launch-router takes it; here it has no meaning")
        elif hint := nearest_flag(flag, options):
            cures.append(f"{flag}: did you mean `{hint}`?")
    return [*cures, *(f"{', '.join(flags)}: {reason} ({PAGE})" for reason, flags in absent.items())]


def nearest_flag(flag: str, options: Sequence[str]) -> str:
    """The closest flag by letters, or by words if one is left out; "" if none is close: a wrong
    suggestion is worse than none."""
    flag = flag.lower().replace("_", "-")
    near = difflib.get_close_matches(flag, options, n=1, cutoff=FLAG_CUTOFF)
    if near:
        return near[0]
    parts = set(flag.removeprefix("--").split("-"))
    wider = [name for name in options if parts < set(name.removeprefix("--").split("-"))]
    close = [name for name in wider if name.count("-") == flag.count("-") + 1]
    return close[0] if len(parts) > 1 and len(close) == 1 else ""


def whole(low: int, high: int) -> Callable[[str], int]:
    """A reader of whole numbers from `low` to `high`; it raises ArgumentTypeError."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            _refuse(f"{text!r}: expected a whole number from {low} to {high}")
        return value

    return read


def positive(text: str) -> float:
    value = not_negative(text)
    if not value:
        _refuse(f"{text!r}: expected a number above 0")
    return value


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        _refuse(f"{text!r}: expected a number, 0 or more")
    return value


def _refuse(reason: str) -> NoReturn:
    raise argparse.ArgumentTypeError(reason)
