"""`omni-proxy init [FILE]`: writes a configuration file, from flags or from answers.

Invariant: what is written passes `omni-proxy check`, and a file that exists is not overwritten
without --force. A question is asked only for what no flag has set, and only on a terminal. The
comments are the descriptions of the JSON schema. Exit status 0: written; 2: nothing was written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from omni_proxy.cli import EXIT_USAGE_ERROR
from omni_proxy.cli.config_file.schema import schema_text
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.config.fields import POLICIES
from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.problem import to_toml_literal
from omni_proxy.shared.origins import is_loopback

DEFAULT_FILE: Final = Path("proxy.toml")
SCHEMA_FILE: Final = "omni-proxy.schema.json"
KEY_VARIABLE: Final = "OMNI_ADMIN_KEY"
_COMMENT_COLUMN: Final = 32
_LINE: Final = 100

Ask = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Choices:
    """Values to write. `worker_urls`: separated by spaces or commas. `admin_key_env`: "" for no
    admin key."""

    worker_urls: str = ""
    policy: str = "cache_aware"
    host: str = "127.0.0.1"
    port: str = "30000"
    access_log: str = "access.log"
    admin_key_env: str = ""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy init",
        description="Write a configuration file with comments. On a terminal it asks for what no "
        "flag sets.",
    )
    add, usual = result.add_argument, Choices()
    add("file", metavar="FILE", type=Path, nargs="?", default=DEFAULT_FILE,
        help=f"default {DEFAULT_FILE}; - is stdout")  # fmt: skip
    add(
        "--worker-urls",
        metavar="URL",
        nargs="+",
        help="URLs of workers, such as http://10.0.0.1:8000",
    )
    add("--policy", metavar="NAME", help=f"{', '.join(POLICIES)} (default {usual.policy})")
    add("--host", metavar="HOST", help=f"address to listen on (default {usual.host})")
    add("--port", metavar="PORT", help=f"port to listen on (default {usual.port})")
    add("--access-log", metavar="PATH", help=f'"-" is stdout (default {usual.access_log})')
    add("--admin-key-env", metavar="NAME",
        help="environment variable with the admin key; empty: none (default: none on a loopback "
        f"address, else {KEY_VARIABLE})")  # fmt: skip
    add("--schema", action="store_true", help=f"also write {SCHEMA_FILE} next to FILE, for editors")
    add("--force", action="store_true", help="overwrite FILE")
    add("--no-input", action="store_true", help="ask nothing")
    return result


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    file: Path = arguments.file
    to_stdout = str(file) == "-"
    if not to_stdout and file.exists() and not arguments.force:
        return _refuse(f"{file} exists; --force overwrites it")
    asks = not arguments.no_input and sys.stdin.isatty() and not to_stdout
    try:
        text = render(choose(arguments, _ask if asks else None), schema=arguments.schema)
        check(text, str(file))
        if to_stdout:
            sys.stdout.write(text)
            return 0
        if arguments.schema:
            _write(file.parent / SCHEMA_FILE, schema_text())
        _write(file, text)
    except ConfigError as error:
        return _refuse(str(error))
    except EOFError:
        return _refuse("no answer; nothing is written")
    except OSError as error:
        return _refuse(f"{error.filename or file}: {error.strerror}; nothing is written")
    print(f"{file}: written. Next:\n" + "".join(f"  {line}\n" for line in _next_steps(text, file)))
    return 0


def _write(file: Path, text: str) -> None:
    """Write the whole file or nothing. Raises OSError."""
    aside = file.with_name(f".{file.name}.new")
    aside.write_text(text, "utf-8")
    aside.replace(file)


def choose(arguments: argparse.Namespace, ask: Ask | None) -> Choices:
    """Choices from flags, else from answers, else defaults. Raises EOFError, ConfigError."""
    choices = Choices()
    for name, question in (
        ("worker_urls", "URLs of your engines, separated by spaces (you can add them later)"),
        ("policy", f"policy ({', '.join(POLICIES)})"),
        ("host", "address to listen on; 0.0.0.0 opens the proxy to the network"),
        ("port", "port"),
        ("access_log", 'access log; "-" is stdout, "off" is none'),
        ("admin_key_env", "environment variable with the admin key; - is none"),
    ):
        if name == "admin_key_env" and not is_local(choices.host):
            choices = replace(choices, admin_key_env=KEY_VARIABLE)
        flag_value = getattr(arguments, name)
        if flag_value is not None:
            value = " ".join(flag_value) if name == "worker_urls" else str(flag_value)
            choices = replace(choices, **{name: value})
        elif ask is not None and (name != "admin_key_env" or not is_local(choices.host)):
            choices = _answered(choices, name, question, ask)
    return choices


def _answered(choices: Choices, name: str, question: str, ask: Ask) -> Choices:
    """The choices with a valid answer. After an invalid one it prints the reason and asks again."""
    usual = getattr(choices, name)
    shown = f" [{usual}]" if usual else ""
    while True:
        answer = ask(f"{question}{shown}: ").strip()
        if not answer:
            return choices
        none = name == "admin_key_env" and answer == "-"
        answered = replace(choices, **{name: "" if none else answer})
        try:
            check(render(answered), "")
        except ConfigError as error:
            problem = error.problems[0]
            hint = f"; {problem.hint}" if problem.hint else ""
            print(f"  {problem.reason}{hint}", file=sys.stderr)
            continue
        return answered


def _ask(question: str) -> str:
    return input(question)


def is_local(host: str) -> bool:
    """Whether only this machine can connect to it."""
    return host.startswith("unix:") or is_loopback(host.strip("[]"))


def check(text: str, file: str) -> None:
    """Validate like `omni-proxy check`. Raises ConfigError."""
    from omni_proxy.routing.policies.plugins import check_policy
    from omni_proxy.upstream_http.resolver import reject_own_addresses

    config = parse(text, file)
    check_policy(config, file)
    reject_own_addresses(config, (), file)


def render(choices: Choices, *, schema: bool = False) -> str:
    """The text of the file."""
    described = json.loads(schema_text())["properties"]
    lines = [f"#:schema ./{SCHEMA_FILE}"] if schema else []
    lines += [
        "# The configuration of omni-proxy. A change is applied when the file is saved; an invalid",
        "# file changes nothing. `omni-proxy check` validates it, docs/configuration.md lists all",
        "# keys. A line that begins with # and a key shows a default.",
        "",
        *_table(described, "server", {
            "host": choices.host, "port": _number(choices.port), "access_log": choices.access_log,
        }, ("max_inflight", "queue_size", "processes")),
        *_table(described, "routing", {"policy": choices.policy}, ("max_total_retries",)),
        *_table(described, "health", {}, ("endpoint", "interval_secs", "failure_threshold")),
        *_table(described, "admin", {}, ("audit_log", "allowed_hosts")),
    ]  # fmt: skip
    keys, workers = described["admin"]["properties"]["keys"]["items"], described["workers"]["items"]
    if choices.admin_key_env:
        entry = {"name": "admin", "key_env": choices.admin_key_env, "role": "all"}
        lines += ["[[admin.keys]]", *_lines(keys["properties"], entry, ()), ""]
    urls = choices.worker_urls.replace(",", " ").split()
    for url in urls:
        shown = {"url": url}
        lines += ["[[workers]]", *_lines(workers["properties"], shown, ("model",)), ""]
    if not urls:
        lines += ["# No workers yet: one such table for each.", "# [[workers]]"]
        lines += ['# url = "http://127.0.0.1:8000"']
    return "\n".join(lines).rstrip() + "\n"


def _table(
    described: dict[str, Any], name: str, values: Mapping[str, object], defaults: Sequence[str]
) -> list[str]:
    return [f"[{name}]", *_lines(described[name]["properties"], values, defaults), ""]


def _lines(
    properties: dict[str, Any], values: Mapping[str, object], defaults: Sequence[str]
) -> Iterator[str]:
    shown = [("", name, value) for name, value in values.items()]
    shown += [("# ", name, properties[name]["default"]) for name in defaults]
    for mark, name, value in shown:
        code = f"{mark}{name} = {_literal(value)}"
        about = properties[name].get("description", "")
        line = f"{code:{_COMMENT_COLUMN}} # {about}"
        if len(line) <= _LINE:
            yield line
        else:
            yield from wrap(about, _LINE, initial_indent="# ", subsequent_indent="# ")
            yield code


def _literal(value: object) -> str:
    if isinstance(value, str | list):  # JSON's escapes are TOML's
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return to_toml_literal(value)


def _number(text: str) -> object:
    return int(text) if text.isascii() and text.isdecimal() else text


def _next_steps(text: str, file: Path) -> Iterator[str]:
    config = parse(text, str(file))
    for key in config.admin.keys:
        yield f'export {key.key_env}="$(openssl rand -hex 32)"'
    yield f"omni-proxy --config {file}"
    if config.workers:
        yield f"omni-proxy status --config {file}"
    else:
        yield f"omni-proxy workers add http://HOST:PORT --config {file}"


def _refuse(message: str) -> int:
    print(f"omni-proxy init: {message}", file=sys.stderr)
    return EXIT_USAGE_ERROR
