"""Parses TOML text into a Config, or raises one error with all of its problems.

Checked in this order: encoding and grammar, each key against the schema (`walk`), then the rules
between keys (`check_rules`). `decode_text`, `parse_tables` and `config_error` are also used for the
state file.
"""

import re
import tomllib
from collections.abc import Iterable
from typing import Any

import msgspec

from omni_proxy.config.problem import ConfigError, Problem, format_path, locate, nearest_line
from omni_proxy.config.schema import Config
from omni_proxy.config.validate import Finding, check_rules, walk

__all__ = ["ConfigError", "Problem", "parse"]


def parse(text: str | bytes, file: str = "<string>") -> Config:
    """`text` may be the raw bytes of a file. Raises ConfigError with all problems."""
    text = decode_text(text, file)
    values, findings = walk(parse_tables(text, file), Config)
    findings += check_rules(values)
    if findings:
        raise config_error(findings, text, file)
    return msgspec.convert(values, Config)


def decode_text(raw: str | bytes, file: str) -> str:
    if isinstance(raw, str):
        return raw
    try:
        # Some editors begin a file with a byte order mark, which TOML does not allow.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _error_at(f"byte 0x{raw[error.start]:02x} is not UTF-8", line, file) from None


def parse_tables(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    # Not only TOMLDecodeError: a number above Python's limit of digits raises a bare ValueError.
    except ValueError as error:
        reason = str(error)
        position = re.search(r"\(at (?:line (\d+), column \d+|end of document)\)$", reason)
        line = int(position[1] or text.count("\n") + 1) if position else None
        raise _error_at(f"not TOML: {reason[:1].lower()}{reason[1:]}", line, file) from None
    except RecursionError:
        raise _error_at("not TOML: nested too deeply", None, file) from None


def config_error(findings: Iterable[Finding], text: str, file: str) -> ConfigError:
    lines = locate(text)
    return ConfigError(
        [
            Problem(format_path(path), nearest_line(lines, path), reason, hint, file)
            for path, reason, hint in findings
        ],
        file,
    )


def _error_at(reason: str, line: int | None, file: str) -> ConfigError:
    return ConfigError([Problem("", line, reason, file=file)], file)
