"""`omni-proxy picker`: runs the policies without a relay, for Envoy and callers of POST /select.

It is the program of `omni-proxy serve` with one data-plane process, whose listener has control
routes only. Exit status 2: nothing ran.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from omni_proxy.cli.flags.start_parsers import picker_parser
from omni_proxy.cli.serve import start, startup_of
from omni_proxy.config.parse import ConfigError

NEEDED: Final = ("grpc", "google.protobuf")
MISSING: Final = (
    "omni-proxy picker: Envoy's protocol needs packages that are not installed: "
    "pip install 'omni-proxy[picker]'"
)


def main(argv: Sequence[str]) -> int:
    parser = picker_parser()
    arguments = parser.parse_args(argv)
    if arguments.config is None and not (arguments.worker_urls or arguments.service_discovery):
        parser.error("name a file with --config FILE, or workers with --worker-urls URL ...")
    if not all(map(_is_installed, NEEDED)):
        print(MISSING, file=sys.stderr)
        return 2
    try:
        startup = startup_of(arguments, os.environ.get("SGLANG_OMNI_ADMIN_KEY", ""))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    # A single process: there are no counts of other processes to agree with.
    overrides = {**startup.overrides, "server.processes": 1}
    return start(replace(startup, overrides=overrides, picker=True))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
