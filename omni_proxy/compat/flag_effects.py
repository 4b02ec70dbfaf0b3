"""What each flag of the other routers does here: the tables of the command line, in one place.

Pure. Contract: a flag of theirs sets a key, is refused, or has no effect; no flag is two of these.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.cli.flags import peer_flags
from omni_proxy.config.flags import FLAG_ALIASES, FLAGS

# Of the command itself.
_OWN: Final = frozenset(("--worker-urls",))
# What a command line would be told in other words than a program.
_REFUSED: Final = {
    "--backend": "workers of any engine are taken as they are: name them in worker_urls",
    "--bootstrap-port-annotation": peer_flags.MISSING["--service-discovery"],
    "--ca-cert-paths": "name one file as tls_worker_ca in [server] of a configuration file, and "
    "start the proxy by its command",
}
_KEYS: Final[dict[str, str]] = {
    **FLAGS,
    **{name: FLAGS[flag] for flag, names in FLAG_ALIASES.items() for name in names},
    **peer_flags.VALUED,
    **peer_flags.LISTS,
    **peer_flags.JOINED,
    **{flag: key for flag, (key, _) in peer_flags.SWITCHES.items()},
}


def has_effect(flag: str) -> bool:
    """Whether it sets something here."""
    return flag in _OWN or flag in _KEYS


def refusal_of(flag: str) -> str:
    """Why it is refused, and what to do instead; "" where it is not."""
    return _REFUSED.get(flag) or peer_flags.explain_missing_flag(flag)


def describe_flag(flag: str) -> str:
    """One line for a parser's help."""
    if has_effect(flag):
        key = _KEYS.get(flag, "")
        return f"sets {key}" if key else "workers that run already"
    if why := refusal_of(flag):
        return f"not served: {why}"
    if flag in peer_flags.WITHOUT_EFFECT:
        return f"no effect: {peer_flags.WITHOUT_EFFECT[flag][0]}"
    return "no effect here"
