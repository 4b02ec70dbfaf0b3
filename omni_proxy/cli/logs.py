"""`omni-proxy logs`: the access log or the route log of a proxy on this machine, pretty-printed.

Exit status 0: shown; 1: no log to show; 2: nobody could be asked where it is; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from omni_proxy.cli.admin_client import (
    NO_SUCH_PLACE,
    AdminClientError,
    AdminTarget,
    Proxy,
    add_place,
    file_of,
    place_of,
)
from omni_proxy.cli.log_format import as_it_is, pretty
from omni_proxy.cli.tail import Tail
from omni_proxy.cli.text_table import plain

NO_LOG: Final = 1
INTERRUPTED: Final = 130
LINES: Final = 20
OFF, STDOUT = "off", "-"
_EPILOG: Final = """\
examples:
  omni-proxy logs --follow
  omni-proxy logs --config proxy.toml --lines 500 --raw | jq .outcome
"""


class NoLog(Exception):
    """There is none, or not here; the text says how to get one."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="omni-proxy logs",
        description="The access log of a proxy on this machine, one short line per request.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--follow", "-f", action="store_true", help="go on with what comes")
    made.add_argument(
        "--lines", "-n", metavar="N", type=_count, default=LINES,
        help=f"so many from the end (default {LINES})",
    )  # fmt: skip
    made.add_argument("--route", action="store_true", help="the route log instead")
    made.add_argument("--raw", action="store_true", help="the lines as they are in the file")
    made.add_argument("--file", metavar="PATH", type=Path, help="this log; nobody is asked for it")
    add_place(made)
    return made


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is no number of lines")
    return int(text)


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        path = arguments.file or log_file(arguments)
        _show(path, arguments)
    except AdminClientError as why:
        print(f"omni-proxy logs: {why}", file=sys.stderr)
        return NO_SUCH_PLACE
    except NoLog as why:
        print(f"omni-proxy logs: {why}", file=sys.stderr)
        return NO_LOG
    except BrokenPipeError:
        # Whoever read us has left, as `head` does; the last flush must not find that out again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def log_file(arguments: argparse.Namespace) -> Path:
    """Where the proxy writes: from its FILE, or asked of it. Raises AdminClientError, NoLog."""
    key = "route_log" if arguments.route else "access_log"
    folder = Path()
    config, broken = file_of(arguments)
    if config is not None and not broken:
        target = str(getattr(config.server, key))
    else:
        target, folder = _asked(place_of(arguments), key)
    if target == OFF:
        raise NoLog(
            f'[server] {key} is "off": set it to a path in the proxy\'s file, as in '
            f'{key} = "{key.partition("_")[0]}.log"; that needs no restart'
        )
    if target == STDOUT:
        raise NoLog(
            f'[server] {key} is "-": the lines go to the proxy\'s stdout, so look where that goes '
            "(journalctl -u omni-proxy, docker logs), or set a path"
        )
    return folder / target


def _asked(place: AdminTarget, key: str) -> tuple[str, Path]:
    """What the running proxy has under `[server] key`, and the folder in which that is a path."""
    with Proxy(place) as proxy:
        answer = proxy.get("/config")
        if answer.refusal:
            raise AdminClientError(f"{place.url}: {plain(answer.refusal)}")
        try:
            target = str(answer.told["config"]["server"][key])
        except (KeyError, TypeError):
            raise AdminClientError(f"{place.url} tells no configuration") from None
        relative = target not in (OFF, STDOUT) and not Path(target).is_absolute()
        return target, _folder_of(proxy) if relative else Path()


def _folder_of(proxy: Proxy) -> Path:
    """A path in the file is as the proxy sees it, from the folder that it was started in."""
    pid = proxy.get("/status").told.get("pid")
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return Path()


def _show(path: Path, arguments: argparse.Namespace) -> None:
    shown = as_it_is if arguments.raw else pretty
    try:
        with Tail(path, arguments.lines) as tail:
            _put(shown(line) for line in tail.first)
            while arguments.follow:
                _put(shown(line) for line in tail.more())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NoLog(
            f"{path}: {error.strerror}: does the proxy run on this machine, and did it write "
            "anything yet? A log that was copied is shown by --file PATH"
        ) from None


def _put(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
