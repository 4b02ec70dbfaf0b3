"""Router arguments as the words of `omni-proxy launch-router`, which then judges them.

Contract: what has a key here is always said, so that the numbers that a trainer logs are those that
hold; what has none is said where it differs from its default, and the command then takes it with a
warning. What would change who serves a request and is not built raises RouterArgsError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from omni_proxy.cli.flags.peer_flags import PAGE
from omni_proxy.compat.flag_effects import has_effect, refusal_of
from omni_proxy.compat.router_args import RouterArgsBase, default_of, field_table, flag_of

_SCRAPED: Final = frozenset(("--prometheus-host",))


class RouterArgsError(ValueError):
    """These arguments can't be served; the text says which, why, and what to do instead."""


def command_words(args: RouterArgsBase) -> list[str]:
    """The words after `omni-proxy launch-router`. Raises RouterArgsError."""
    refused = []
    words: list[str] = []
    for name, field in field_table(type(args)).items():
        value, flag = getattr(args, name), flag_of(name)
        if flag in _idle_flags(args):
            continue
        if not has_effect(flag):
            if value in (None, False, default_of(field)):
                continue
            if why := refusal_of(flag):
                refused.append(f"{name}: {why} ({PAGE})")
                continue
        words += _words(flag, value)
    if refused:
        raise RouterArgsError("\n".join(("not served by omni-proxy:", *refused)))
    return words


def unknown_warning(names: Sequence[str]) -> str:
    """The one line of the log for arguments that nobody here knows."""
    return f"router arguments that are not known here and have no effect: {', '.join(names)}"


def _idle_flags(args: RouterArgsBase) -> frozenset[str]:
    """What means nothing to those routers beside these arguments."""
    return _SCRAPED if getattr(args, "prometheus_port", None) is None else frozenset()


def _words(flag: str, value: object) -> list[str]:
    """None, false and empty lists are not said: they are what holds without the flag."""
    if value is None or value is False or value in ([], ()):
        return []
    if value is True:
        return [flag]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    text = str(value)
    if flag == "--host":  # as trainers write an address of IPv6
        text = text.removeprefix("[").removesuffix("]")
    return [f"{flag}={text}"]
