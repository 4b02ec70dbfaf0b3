"""`omni-proxy upgrade`: makes the running proxy start a new program, which takes over.

Exit status 0: the new program serves; 1: it failed or was refused, and the old one keeps running;
2: no proxy could be reached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from omni_proxy.cli.client.admin_client import (
    EXIT_NOT_REACHABLE,
    AdminClient,
    AdminClientError,
    add_target_arguments,
    admin_target_of,
)
from omni_proxy.cli.flags.command_parser import CommandParser

NOT_UPGRADED: Final = 1
_EPILOG: Final = """\
Run it on the proxy's machine, as its user or as root. The old program gives its listening sockets
and its state to the new one, and ends when its last request has ended, at the latest after [server]
drain_timeout_secs. If the new one fails, or is not ready within upgrade_timeout_secs, the old one
keeps running. Sending SIGUSR2 to the proxy does the same. See docs/upgrade.md.
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy upgrade",
        description="Start a new program that takes over from the running proxy; no request is "
        "cut. Exit status 0: the new one serves; 1: the old one keeps running; 2: not reachable.",
        epilog=_EPILOG,
    )
    add_target_arguments(result)
    result.add_argument(
        "--binary",
        metavar="FILE",
        type=Path,
        help="executable of the new program (default: the running proxy's file, as it is on disk "
        "now)",
    )
    return result


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    binary = None if arguments.binary is None else str(arguments.binary.absolute())
    try:
        path = _socket_of(arguments)
    except AdminClientError as error:
        print(f"omni-proxy upgrade: {error}", file=sys.stderr)
        return EXIT_NOT_REACHABLE
    try:
        return _upgrade(path, binary)
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        print(
            f"omni-proxy upgrade: {path}: {reason}: run it on the proxy's machine, as its user",
            file=sys.stderr,
        )
        return EXIT_NOT_REACHABLE


def _socket_of(arguments: argparse.Namespace) -> Path:
    """The path of the running proxy's upgrade socket. Raises AdminClientError."""
    target = admin_target_of(arguments)
    with AdminClient(target) as proxy:
        reply = proxy.get("/status")
    if reply.refusal:
        raise AdminClientError(f"{target.url}: {reply.refusal}")
    upgrade = reply.body.get("upgrade")
    if not isinstance(upgrade, dict) or not upgrade.get("socket"):
        raise AdminClientError(f"{target.url}: this version can't be upgraded: restart it")
    return Path(str(upgrade["socket"]))


def _upgrade(path: Path, binary: str | None) -> int:
    """Raises OSError, msgspec.DecodeError."""
    # Imported here: --help must not wait for it.
    from omni_proxy.upgrade.control_socket import DONE, request_upgrade

    for report in request_upgrade(path, binary):
        if not report.outcome:
            print(report.text, flush=True)
        elif report.outcome == DONE:
            print(f"upgraded: {report.text}, process {report.pid}")
            return 0
        else:
            print(
                f"omni-proxy upgrade: {report.text}\nthe old program keeps running", file=sys.stderr
            )
    return NOT_UPGRADED
