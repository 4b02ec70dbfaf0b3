"""`omni-proxy keys ...`: makes keys and their hashes, and says whose a key is by a configuration.

Starts nothing and calls nobody. A key is read from stdin and never an argument, which other users
of the machine could see; none is printed but a new one. Exit status 0: done; 1: `check` found no
owner of the key; 2: no usable key, or the configuration is refused.
"""

from __future__ import annotations

import argparse
import getpass
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hmac import compare_digest
from pathlib import Path
from typing import Final

from omni_proxy.api_keys.resolve import MAX_KEY_BYTES, UnusableKey, sha256_of_key
from omni_proxy.cli.flags.peer_flags import CommandParser
from omni_proxy.config.api_keys import CallerKey
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import Config
from omni_proxy.runtime_config.config_store import read_file
from omni_proxy.runtime_config.key_sources import resolve_keys

PREFIX: Final = "omni-"  # by which scanners of sources find a key that was committed
KEY_BYTES: Final = 32
NOBODY, UNUSABLE = 1, 2
_EPILOG = """\
examples:
  omni-proxy keys new
  omni-proxy keys hash < /run/secrets/team-a
  printenv TEAM_A_KEY | omni-proxy keys check --config proxy.toml
"""


@dataclass(frozen=True, slots=True)
class Owner:
    """`table`: where the key is configured."""

    name: str
    table: str
    may: list[str]


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="omni-proxy keys",
        description="Make keys for [[keys]] and [[admin.keys]], and check them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="print a new key and its hash", allow_abbrev=False)
    digest = commands.add_parser(
        "hash", help="print the hash of the key on stdin, for key_sha256", allow_abbrev=False
    )
    check = commands.add_parser(
        "check", help="say whose the key on stdin is, and what it may do", allow_abbrev=False
    )
    check.add_argument(
        "--config", metavar="FILE", type=Path, required=True, help="the TOML file that has the keys"
    )
    for command in (new, digest, check):
        command.add_argument("--json", action="store_true", help="for machines: one object")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        if arguments.command == "new":
            return _new(as_json=arguments.json)
        digest = sha256_of_key(_read_key())
        if arguments.command == "hash":
            print(json.dumps({"key_sha256": digest}) if arguments.json else digest)
            return 0
        return _check(digest, arguments.config, as_json=arguments.json)
    except UnusableKey as unusable:
        print(f"omni-proxy keys: stdin {unusable}", file=sys.stderr)
    except ConfigError as refusal:
        print(refusal, file=sys.stderr)
    return UNUSABLE


def _read_key() -> bytes:
    if sys.stdin.isatty():
        return getpass.getpass("key: ").encode("utf-8", "surrogateescape")
    return sys.stdin.buffer.read(MAX_KEY_BYTES + 64)


def _new(*, as_json: bool) -> int:
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    made = {"key": key, "key_sha256": sha256_of_key(key.encode())}
    if as_json:
        print(json.dumps(made))
    else:
        for name, value in made.items():
            print(f"{name:<11} {value}")
    return 0


def _check(digest: str, file: Path, *, as_json: bool) -> int:
    owners = owners_of(digest, read_file(file), str(file))
    if as_json:
        print(json.dumps({"owners": [asdict(owner) for owner in owners]}))
    for owner in owners if not as_json else ():
        print(f"{owner.table} {owner.name}: {'; '.join(owner.may)}")
    if not owners:
        print(f"{file}: nobody has this key", file=sys.stderr)
        return NOBODY
    return 0


def owners_of(digest: str, config: Config, file: str) -> list[Owner]:
    """All that this key is in a configuration. Raises ConfigError for a key that can't be read."""
    found = []
    for table, key in (("[server]", config.server.api_key), ("[admin]", config.admin.api_key)):
        if key and compare_digest(sha256_of_key(key.encode()), digest):
            routes = "model routes" if table == "[server]" else "control routes"
            found.append(Owner("api_key", table, [f"all {routes}", "no limits"]))
    callers = resolve_keys(config.keys, ("keys",), file)
    admins = resolve_keys(config.admin.keys, ("admin", "keys"), file)
    return [
        *found,
        *(
            Owner(caller.name, "[[keys]]", _allowed(caller))
            for caller in callers
            if compare_digest(caller.key_sha256, digest)
        ),
        *(
            Owner(admin.name, "[[admin.keys]]", [f"role {admin.role}"])
            for admin in admins
            if compare_digest(admin.key_sha256, digest)
        ),
    ]


def _allowed(caller: CallerKey) -> list[str]:
    may = [f"models {', '.join(caller.models)}" if caller.models else "all models"]
    for limit, noun in (
        (caller.max_inflight, "requests in flight"),
        (caller.requests_per_minute, "requests per minute"),
        (caller.tokens_per_minute, "tokens per minute"),
    ):
        may.append(f"{limit} {noun}" if limit else f"no limit of {noun}")
    return [*may, f"priority {caller.priority}"]
