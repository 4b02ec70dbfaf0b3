"""The words that the commands take.

Values of keys stay the strings that were typed: the configuration judges them, by the same rules
and with the same words as it judges FILE.
"""

import argparse
from pathlib import Path
from typing import Final

from omni_proxy import __version__
from omni_proxy.config.flags import FLAGS

_EPILOG: Final = """\
commands:
  omni-proxy [serve] ...     run the proxy (this page)
  omni-proxy check FILE      say whether FILE would load; binds nothing
  omni-proxy replica ...     run one inference replica; see `omni-proxy replica --help`

examples:
  omni-proxy --config config/example.toml
  omni-proxy --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000 --policy least_request
  omni-proxy --config proxy.toml --port 8080 --log-level debug
  omni-proxy check proxy.toml --json

A flag wins over the configuration file, also when the file is read again. SIGHUP, a change of the
file or POST /reload read it again; SIGTERM drains, a second one cuts.
"""
_HELP: Final[dict[str, tuple[str, str]]] = {
    "--host": ("HOST", "address to listen on (default 127.0.0.1)"),
    "--port": ("PORT", "port to listen on; 0 takes any free one (default 30000)"),
    "--policy": ("NAME", "round_robin, least_request, random or power_of_two"),
    "--model": ("NAME", "model of every worker that names none"),
    "--request-timeout-secs": ("SECS", "whole non-streaming exchange; 0 is none (default 1800)"),
    "--max-payload-size": ("BYTES", 'largest request body, also as "64MiB" (default 512MiB)'),
    "--health-failure-threshold": ("N", "bad probes in a row until a worker is out (default 3)"),
    "--health-success-threshold": ("N", "good probes in a row until it is back (default 2)"),
    "--health-check-timeout-secs": ("SECS", "time for one probe (default 5)"),
    "--health-check-interval-secs": ("SECS", "time between two probes (default 10)"),
    "--health-check-endpoint": ("PATH", "path that is probed (default /health)"),
    "--admin-api-key": ("KEY", "needed for changes; else the file's, else SGLANG_OMNI_ADMIN_KEY"),
    "--log-level": ("LEVEL", "debug, info, warning, error or critical (default info)"),
}


def serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-proxy",
        description="One process in front of complete inference replicas.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # A prefix that works today breaks on the day a second flag begins with it.
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"omni-proxy {__version__}")
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="the TOML file, read again when it changes"
    )
    parser.add_argument(
        "--worker-urls",
        metavar="URL",
        nargs="+",
        action="extend",
        default=[],
        help="workers, beside those of the file",
    )
    for flag, key in FLAGS.items():
        metavar, text = _HELP[flag]
        # Absent flags leave no trace: what is in the namespace under a key was asked for.
        parser.add_argument(flag, dest=key, metavar=metavar, default=argparse.SUPPRESS, help=text)
    return parser


def check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-proxy check",
        description="Say whether FILE would load. Exit status 0: it would; 2: it is refused.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the TOML file to judge")
    parser.add_argument("--json", action="store_true", help="for machines: one object on stdout")
    return parser
