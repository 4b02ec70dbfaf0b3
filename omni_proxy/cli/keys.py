"""`omni-proxy keys ...`: makes keys and their hashes, adds callers to a running proxy, shows their
usage, and finds the owner of a key.

`add`, `remove` and `usage` call a running proxy, which receives only the hash of a key. A key is
read from stdin and is never an argument, which other users of the machine could see; only new keys
are printed. Exit status 0: done; 1: `check` found no owner of the key; 2: no usable key, a refused
configuration or change, or no proxy to reach.
"""

from __future__ import annotations

import argparse
import getpass
import json
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hmac import compare_digest
from pathlib import Path
from typing import Final
from urllib.parse import quote

from omni_proxy.api_keys.key_table import MAX_KEY_BYTES, UnusableKey, sha256_of_key
from omni_proxy.cli.client.admin_client import (
    AdminClient,
    AdminClientError,
    JsonObject,
    add_target_arguments,
    admin_target_of,
)
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.cli.terminal_text import printable, render_table
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.runtime_config.config_store import read_file
from omni_proxy.runtime_config.key_sources import resolve_keys

PREFIX: Final = "omni-"  # lets secret scanners find keys that were committed
KEY_BYTES: Final = 32
EXIT_NO_OWNER: Final = 1
EXIT_FAILED: Final = 2
ANSWER_SECS: Final = 30.0
LIMITS: Final = ("max_inflight", "requests_per_minute", "tokens_per_minute")
PRIORITIES: Final = range(-1000, 1001)
FIRST_KEY_WARNING: Final = (
    "With the first such entry, model routes answer 401 to requests without a key."
)
_USAGE: Final = ("CALLER", "BUSY", "REQUESTS", "IN", "OUT", "REQ/MIN", "TOKENS/MIN", "REFUSED")
_EPILOG = """\
examples:
  omni-proxy keys add team-a --max-inflight 4 --tokens-per-minute 100000
  omni-proxy keys new --name team-b --models qwen3-32b lora-b --priority 5
  omni-proxy keys usage
  omni-proxy keys hash < /run/secrets/team-a
  printenv TEAM_A_KEY | omni-proxy keys check --config proxy.toml
"""


@dataclass(frozen=True, slots=True)
class Owner:
    """`table`: where the key is configured."""

    name: str
    table: str
    permissions: list[str]


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="omni-proxy keys",
        description="Make keys for [[keys]] and [[admin.keys]], and check them.",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="print a new key, and its hash or its entry for FILE")
    new.add_argument(
        "--name", type=_name, help="name of the caller; prints its [[keys]] entry for FILE"
    )
    _add_limits(new, "with --name: ")
    add = commands.add_parser("add", help="add a caller to a running proxy, with a new key")
    add.add_argument("name", metavar="NAME", type=_name, help="name of the caller, such as team-a")
    _add_limits(add)
    add_target_arguments(add)
    remove = commands.add_parser("remove", help="remove a caller that `keys add` added")
    remove.add_argument("name", metavar="NAME", type=_name, help="as `keys usage` shows it")
    add_target_arguments(remove)
    usage = commands.add_parser("usage", help="show what the callers of a running proxy have used")
    add_target_arguments(usage)
    digest = commands.add_parser("hash", help="print the hash of the key on stdin, for key_sha256")
    check = commands.add_parser(
        "check", help="show the owner of the key on stdin and what it may do"
    )
    check.add_argument(
        "--config", metavar="FILE", type=Path, required=True, help="the TOML file that has the keys"
    )
    for command in (new, add, remove, digest, check, usage):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_limits(command: argparse.ArgumentParser, where: str = "") -> None:
    for limit in LIMITS:
        words = limit.replace("_", " ").replace("max inflight", "requests in flight")
        command.add_argument(
            f"--{limit.replace('_', '-')}", metavar="N", type=_limit,
            help=f"{where}limit of {words} (default none)",
        )  # fmt: skip
    command.add_argument(
        "--models", metavar="NAME", nargs="+", type=_model,
        help=f"{where}models that its requests may name (default all)",
    )  # fmt: skip
    command.add_argument(
        "--priority", metavar="N", type=_priority,
        help=f"{where}queue priority of its requests; the highest goes first (default 0)",
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        if arguments.command == "new":
            return _new(arguments)
        if call := {"usage": _usage, "add": _add, "remove": _remove}.get(arguments.command):
            return call(arguments)
        digest = sha256_of_key(_read_key())
        if arguments.command == "hash":
            print(json.dumps({"key_sha256": digest}) if arguments.json else digest)
            return 0
        return _check(digest, arguments.config, as_json=arguments.json)
    except UnusableKey as error:
        print(f"omni-proxy keys: stdin {error}", file=sys.stderr)
    except ConfigError as error:
        print(error, file=sys.stderr)
    except AdminClientError as error:
        print(f"omni-proxy keys: {error}", file=sys.stderr)
    return EXIT_FAILED


def _read_key() -> bytes:
    if sys.stdin.isatty():
        return getpass.getpass("key: ").encode("utf-8", "surrogateescape")
    return sys.stdin.buffer.read(MAX_KEY_BYTES + 64)


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.:@/-]{1,64}", text):
        raise argparse.ArgumentTypeError("1 to 64 letters, digits and _.:@/-")
    return text


def _limit(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError("a whole number from 1 on; without it there is no limit")
    return int(text)


def _model(text: str) -> str:
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError("the name of a model, alias or adapter")
    return text


def _priority(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = PRIORITIES.stop
    if value not in PRIORITIES:
        raise argparse.ArgumentTypeError("a whole number from -1000 to 1000")
    return value


def _new_key() -> tuple[str, dict[str, str]]:
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, {"key": key, "key_sha256": sha256_of_key(key.encode())}


def _limits_of(arguments: argparse.Namespace) -> JsonObject:
    names = ("models", *LIMITS, "priority")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name)}


def _add(arguments: argparse.Namespace) -> int:
    key, key_record = _new_key()
    entry = {
        "name": arguments.name,
        "key_sha256": key_record["key_sha256"],
        **_limits_of(arguments),
    }
    with AdminClient(admin_target_of(arguments), ANSWER_SECS) as proxy:
        first = not proxy.get("/feed?once=true").body.get("key_required")
        reply = proxy.send("POST", "/keys", entry)
    if reply.refusal:
        print(f"omni-proxy keys: {printable(reply.refusal)}", file=sys.stderr)
        return EXIT_FAILED
    if arguments.json:
        print(json.dumps(key_record | entry))
        return 0
    print(f"The key of {arguments.name}, shown only once:\n{key}\n")
    print(
        f"It is valid now and is kept. Its usage: omni-proxy keys usage{_target_words(arguments)}"
    )
    if first:
        print("It is the first key: from now on model routes answer 401 to requests without one.")
    return 0


def _target_words(arguments: argparse.Namespace) -> str:
    """The flags that select the same proxy in the next command."""
    if arguments.config:
        return f" --config {arguments.config}"
    return f" --url {arguments.url}" if arguments.url else ""


def _remove(arguments: argparse.Namespace) -> int:
    with AdminClient(admin_target_of(arguments), ANSWER_SECS) as proxy:
        reply = proxy.send("DELETE", f"/keys/{quote(arguments.name, safe='')}")
    if reply.refusal:
        print(f"omni-proxy keys: {printable(reply.refusal)}", file=sys.stderr)
        return EXIT_FAILED
    if arguments.json:
        print(json.dumps(reply.body))
        return 0
    print(f"{arguments.name} is removed: its key is refused from now on")
    if not reply.body.get("key_required"):
        print("It was the last key: model routes are open to everyone who reaches them.")
    return 0


def _new(arguments: argparse.Namespace) -> int:
    key, key_record = _new_key()
    limits = _limits_of(arguments)
    if limits and not arguments.name:
        print("omni-proxy keys: limits are part of an entry: pass --name too", file=sys.stderr)
        return EXIT_FAILED
    if arguments.json:
        entry = {"name": arguments.name, **limits} if arguments.name else {}
        print(json.dumps(key_record | entry))
    elif arguments.name:
        print(f"The key, for the caller only:\n{key}\n\nFor the configuration file:")
        print(f"# {FIRST_KEY_WARNING}\n[[keys]]")
        print(f'name = "{arguments.name}"\nkey_sha256 = "{key_record["key_sha256"]}"')
        for name, value in limits.items():
            # A string or an array of strings is the same in JSON and in TOML.
            print(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    else:
        for name, value in key_record.items():
            print(f"{name:<11} {value}")
    return 0


def _usage(arguments: argparse.Namespace) -> int:
    with AdminClient(admin_target_of(arguments), ANSWER_SECS) as proxy:
        reply = proxy.get("/keys")
    if reply.refusal:
        print(f"omni-proxy keys: {printable(reply.refusal)}", file=sys.stderr)
        return EXIT_FAILED
    if arguments.json:
        print(json.dumps(reply.body, indent=2))
    else:
        print("\n".join(usage_lines(reply.body)))
    return 0


def usage_lines(body: JsonObject) -> list[str]:
    """A table for a response of GET /keys."""
    callers = body.get("keys") or []
    if not callers:
        none = "no callers: `omni-proxy keys add NAME` adds one"
        return [none, *_refusal_lines(body)]

    def row(caller: JsonObject) -> tuple[object, ...]:
        bound = caller.get("max_inflight")
        refused = (f"{why} {n}" for why, n in (caller.get("refused") or {}).items() if n)
        return (
            printable(caller.get("name")),
            f"{caller.get('in_flight', 0)}{f' of {bound}' if bound else ''}",
            caller.get("requests", 0),
            caller.get("input_tokens", 0),
            caller.get("output_tokens", 0),
            caller.get("requests_per_minute") or "-",
            caller.get("tokens_per_minute") or "-",
            ", ".join(refused) or "-",
        )

    table = render_table(_USAGE, [row(caller) for caller in callers], right_aligned=_USAGE[1:7])
    return [*table, *_refusal_lines(body)]


def _refusal_lines(body: JsonObject) -> list[str]:
    """A line about requests without a valid key, if there were any."""
    if not (total := body.get("refused_without_key")):
        return []
    recent = body.get("refused_without_key_last_minute", 0)
    return [
        f"without a valid key: {total} refused (401) since the start, {recent} in the last minute"
    ]


def _check(digest: str, file: Path, *, as_json: bool) -> int:
    owners = owners_of(digest, read_file(file), str(file))
    if as_json:
        print(json.dumps({"owners": [_owner_record(owner) for owner in owners]}))
    for owner in owners if not as_json else ():
        print(f"{owner.table} {owner.name}: {'; '.join(owner.permissions)}")
    if not owners:
        print(f"{file}: no entry has this key", file=sys.stderr)
        return EXIT_NO_OWNER
    return 0


def _owner_record(owner: Owner) -> JsonObject:
    return asdict(owner) | {"may": owner.permissions}  # the old name, for one release


def owners_of(digest: str, config: Config, file: str) -> list[Owner]:
    """All owners of the key in a configuration. Raises ConfigError if a configured key can't be
    read."""
    owners = []
    for table, key in (("[server]", config.server.api_key), ("[admin]", config.admin.api_key)):
        if key and compare_digest(sha256_of_key(key.encode()), digest):
            routes = "model routes" if table == "[server]" else "control routes"
            owners.append(Owner("api_key", table, [f"all {routes}", "no limits"]))
    callers = resolve_keys(config.keys, ("keys",), file)
    admins = resolve_keys(config.admin.keys, ("admin", "keys"), file)
    return [
        *owners,
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
    permissions = [f"models {', '.join(caller.models)}" if caller.models else "all models"]
    for limit, noun in (
        (caller.max_inflight, "requests in flight"),
        (caller.requests_per_minute, "requests per minute"),
        (caller.tokens_per_minute, "tokens per minute"),
    ):
        permissions.append(f"{limit} {noun}" if limit else f"no limit of {noun}")
    return [*permissions, f"priority {caller.priority}"]
