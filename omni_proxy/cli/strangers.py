"""Flags that we do not have: the nearest one of ours, or what another router's word is called here.

Contract: a refused command line says what to write instead; docs/migration.md has the same words.
A flag of `THEIRS` is none of ours, in no command.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn

from omni_proxy.config.problem import did_you_mean

_UNKNOWN: Final = "unrecognized arguments: "
_PAGE: Final = "docs/migration.md"
THEIRS: Final = {
    "--api-key": "--admin-api-key KEY: it guards changes, not model traffic",
    "--backend": "--engine of omni-proxy launch",
    "--ca-cert-path": "tls_ca in [[workers]], or tls_worker_ca in [server]",
    "--check-config": "omni-proxy check FILE",
    "--disable-circuit-breaker": "--max-worker-retries 0",
    "--disable-retries": "--max-total-retries 1",
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
    "--sticky-sessions": "sticky_sessions = true in [routing]",
    "--worker-config": "[[workers]] in the file",
    "--worker-warmup-secs": "warmup_share in [routing.cache_aware]",
}


class Parser(argparse.ArgumentParser):
    """As argparse's own, and it has a word on flags that it does not know."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix(_UNKNOWN).split() if message.startswith(_UNKNOWN) else []
        known = [name for action in self._actions for name in action.option_strings]
        super().error("\n  ".join((message, *_cures(unknown, known))))


def _cures(unknown: Iterable[str], known: Sequence[str]) -> list[str]:
    """A line for each flag of which we have an idea what was meant."""
    cures = []
    for flag in dict.fromkeys(_name(word) for word in unknown if word.startswith("--")):
        plain = flag.replace("--router-", "--", 1)  # as sglang-router's launch_server has them
        if said := THEIRS.get(flag) or THEIRS.get(plain):
            cures.append(f"{flag} is here: {said} ({_PAGE})")
        elif hint := did_you_mean(flag, known):
            cures.append(f"{flag}: {hint}")
    return cures


def routers_own(words: Sequence[str]) -> list[str]:
    """Which of the words that an engine would get are the router's by their name alone.

    `words` are those before a bare `--`: whatever follows that is the engine's.
    """
    own = (word for word in words if word.startswith("--"))
    return [word for word in own if word.startswith("--router-") or _name(word) == "--backend"]


def _name(word: str) -> str:
    return word.partition("=")[0]
