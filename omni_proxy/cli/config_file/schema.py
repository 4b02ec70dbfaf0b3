"""`omni-proxy schema`: the JSON schema of the configuration file, for editors.

Invariant: the schema is a file of the package, made by `tools/configuration-page`, so the command
needs no sources.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.resources import files

from omni_proxy.cli.flags.command_parser import CommandParser

_EPILOG = """\
Even Better TOML, taplo and other editors check and complete a file whose first line names it:

  omni-proxy schema > omni-proxy.schema.json
  #:schema ./omni-proxy.schema.json

`omni-proxy check FILE` checks more: rules between keys, host names, and files that must exist.
"""


def parser() -> argparse.ArgumentParser:
    return CommandParser(
        prog="omni-proxy schema",
        description="Print the JSON schema of the configuration file.",
        epilog=_EPILOG,
    )


def main(argv: Sequence[str]) -> int:
    parser().parse_args(argv)
    sys.stdout.write(schema_text())
    return 0


def schema_text() -> str:
    return (files("omni_proxy.cli.config_file") / "schema.json").read_text("utf-8")
