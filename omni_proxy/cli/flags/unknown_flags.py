"""Flags that we do not have: the nearest one of ours, or what another router's word is called here.
What becomes of those that a router's command takes is `peer_flags`' to say.

Contract: a refused command line says what to write instead; docs/migration.md has the same words.
A flag of `THEIRS` is none of ours, in no command.
"""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn

from omni_proxy.cli.flags.peer_flags import (
    PAGE,
    WITHOUT_EFFECT,
    explain_missing_flag,
    strip_router_prefix,
)
from omni_proxy.config.problem import did_you_mean

_UNKNOWN: Final = "unrecognized arguments: "
THEIRS: Final = {
    "--api-key": "--admin-api-key KEY: it guards changes, not model traffic",
    "--backend": "--engine of omni-proxy launch",
    "--ca-cert-path": "tls_ca in [[workers]], or tls_worker_ca in [server]",
    "--ca-cert-paths": "tls_ca in [[workers]], or tls_worker_ca in [server]",
    "--check-config": "omni-proxy check FILE",
    "--launcher-config": "[[launch]] in the file, or omni-proxy launch",
    "--log-dir": "access_log in [server]; the program's own log goes to stderr",
    "--max-connections": "--max-inflight N",
    "--prometheus-host": "GET /metrics, on the address that serves",
    "--prometheus-port": "GET /metrics, on the port that serves",
    "--request-id-headers": "request_id_header in [server]",
    "--router-processes": "processes in [server]",
    "--router-state-dir": "state_file in [server]",
    "--shutdown-drain-secs": "drain_timeout_secs in [server]",
    "--spill-abs-threshold": 'spill = "chosen" in [routing.cache_aware]',
    "--spill-rel-threshold": 'spill = "chosen" in [routing.cache_aware]',
    "--worker-config": "[[workers]] in the file",
}


_CHOICE: Final = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
FLAG_CUTOFF: Final = 0.8  # the share of letters in common; flags have many by chance


class CommandParser(argparse.ArgumentParser):
    """As argparse's own, and it has a word on flags and commands that it does not know."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix(_UNKNOWN).split() if message.startswith(_UNKNOWN) else []
        known = [
            name
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
        ]
        lines = [*_cures(unknown, known), *_choices(message)]
        super().error("\n  ".join((message, *lines)))


def _choices(message: str) -> list[str]:
    """What was meant by a word of which there are only so many."""
    found = _CHOICE.search(message)
    if found is None:
        return []
    hint = did_you_mean(found[1], re.findall(r"'([^']*)'", found[2]))
    return [hint] if hint else []


def _cures(unknown: Iterable[str], known: Sequence[str]) -> list[str]:
    """A line for each flag of which we have an idea what was meant."""
    cures = []
    absent: dict[str, list[str]] = {}
    for flag in dict.fromkeys(_name(word) for word in unknown if word.startswith("--")):
        bare = strip_router_prefix(flag)
        if said := THEIRS.get(flag) or THEIRS.get(bare):
            cures.append(f"{flag} is here: {said} ({PAGE})")
        elif missing := explain_missing_flag(flag):
            absent.setdefault(missing, []).append(flag)
        elif bare in WITHOUT_EFFECT:
            cures.append(f"{flag}: omni-proxy launch-router takes it; here it has no meaning")
        elif hint := nearest_flag(flag, known):
            cures.append(f"{flag}: did you mean `{hint}`?")
    return [*cures, *(f"{', '.join(flags)}: {why} ({PAGE})" for why, flags in absent.items())]


def nearest_flag(flag: str, known: Sequence[str]) -> str:
    """The one that was meant by its letters, or by its words where one is left out; "" if none is
    near: a wrong suggestion is worse than none."""
    flag = flag.lower().replace("_", "-")
    near = difflib.get_close_matches(flag, known, n=1, cutoff=FLAG_CUTOFF)
    if near:
        return near[0]
    words = set(flag.removeprefix("--").split("-"))
    wider = [name for name in known if words < set(name.removeprefix("--").split("-"))]
    close = [name for name in wider if name.count("-") == flag.count("-") + 1]
    return close[0] if len(words) > 1 and len(close) == 1 else ""


def router_flags_in(words: Sequence[str]) -> list[str]:
    """Which of the words that an engine would get are the router's by their name alone.

    `words` are those before a bare `--`: whatever follows that is the engine's.
    """
    own = (word for word in words if word.startswith("--"))
    return [word for word in own if word.startswith("--router-") or _name(word) == "--backend"]


def _name(word: str) -> str:
    return word.partition("=")[0]
