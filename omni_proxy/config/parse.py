"""TOML text -> Config, or everything that is wrong with it: taken whole or not at all.

Judged in this order: the grammar, each key by its type, then the rules between keys and what this
build does not do yet.
"""

import msgspec

from omni_proxy.config.problem import ConfigError, Problem
from omni_proxy.config.rules import judge
from omni_proxy.config.schema import Config
from omni_proxy.config.source import decoded, refusal, tables
from omni_proxy.config.walk import walk

__all__ = ["ConfigError", "Problem", "parse"]


def parse(text: str | bytes, file: str = "<string>") -> Config:
    """Raises ConfigError with all problems of the text, which may be a file's bytes as read."""
    text = decoded(text, file)
    seen, findings = walk(tables(text, file), Config)
    findings += judge(seen)
    if findings:
        raise refusal(findings, text, file)
    return msgspec.convert(seen, Config)
