"""TOML text -> Config, or everything that is wrong with it: taken whole or not at all.

Judged in this order: the grammar, each key by its type, then the rules between keys and what this
build does not do yet.
"""

import re
import tomllib
from collections.abc import Iterable
from typing import Any

import msgspec

from omni_proxy.config.locate import locate, nearest_line
from omni_proxy.config.problem import ConfigError, Problem, format_path
from omni_proxy.config.rules import check_rules
from omni_proxy.config.schema import Config
from omni_proxy.config.walk import Finding, walk

__all__ = ["ConfigError", "Problem", "parse"]


def parse(text: str | bytes, file: str = "<string>") -> Config:
    """Raises ConfigError with all problems of the text, which may be a file's bytes as read."""
    text = decoded(text, file)
    seen, findings = walk(tables(text, file), Config)
    findings += check_rules(seen)
    if findings:
        raise refusal(findings, text, file)
    return msgspec.convert(seen, Config)


# The text of a TOML file: from bytes to tables, and from findings back to its lines.


def decoded(raw: str | bytes, file: str) -> str:
    if isinstance(raw, str):
        return raw
    try:
        # Some editors begin a file with a byte order mark, which TOML does not know.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _refused(f"byte 0x{raw[error.start]:02x} is not UTF-8", line, file) from None


def tables(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    # Not TOMLDecodeError: Python's own limit on the digits of a number is a bare ValueError.
    except ValueError as error:
        reason = str(error)
        place = re.search(r"\(at (?:line (\d+), column \d+|end of document)\)$", reason)
        line = int(place[1] or text.count("\n") + 1) if place else None
        raise _refused(f"not TOML: {reason[:1].lower()}{reason[1:]}", line, file) from None
    except RecursionError:
        raise _refused("not TOML: nested too deeply", None, file) from None


def refusal(findings: Iterable[Finding], text: str, file: str) -> ConfigError:
    lines = locate(text)
    return ConfigError(
        [
            Problem(format_path(path), nearest_line(lines, path), reason, hint, file)
            for path, reason, hint in findings
        ],
        file,
    )


def _refused(reason: str, line: int | None, file: str) -> ConfigError:
    return ConfigError([Problem("", line, reason, file=file)], file)
