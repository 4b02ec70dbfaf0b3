"""`omni-proxy logs`: the access log or the route log of a proxy on this machine, pretty-printed.

Exit status 0: shown; 1: no log to show; 2: nobody could be asked where it is; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from omni_proxy.cli.client.admin_client import (
    NO_SUCH_PLACE,
    AdminClient,
    AdminClientError,
    AdminTarget,
    add_target_arguments,
    admin_target_of,
    config_of,
)
from omni_proxy.cli.screen.log_format import pretty_line, raw_line
from omni_proxy.cli.screen.text_table import printable

NO_LOG: Final = 1
INTERRUPTED: Final = 130
LINES: Final = 20
OFF, STDOUT = "off", "-"
_EPILOG: Final = """\
examples:
  omni-proxy logs --follow
  omni-proxy logs --config proxy.toml --lines 500 --raw | jq .outcome
"""


class NoLogError(Exception):
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
    add_target_arguments(made)
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
    except NoLogError as why:
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
    """Where the proxy writes: from its FILE, or asked of it. Raises AdminClientError,
    NoLogError."""
    key = "route_log" if arguments.route else "access_log"
    folder = Path()
    config, broken = config_of(arguments)
    if config is not None and not broken:
        target = str(getattr(config.server, key))
    else:
        target, folder = _asked(admin_target_of(arguments), key)
    if target == OFF:
        raise NoLogError(
            f'[server] {key} is "off": set it to a path in the proxy\'s file, as in '
            f'{key} = "{key.partition("_")[0]}.log"; that needs no restart'
        )
    if target == STDOUT:
        raise NoLogError(
            f'[server] {key} is "-": the lines go to the proxy\'s stdout, so look where that goes '
            "(journalctl -u omni-proxy, docker logs), or set a path"
        )
    return folder / target


def _asked(place: AdminTarget, key: str) -> tuple[str, Path]:
    """What the running proxy has under `[server] key`, and the folder in which that is a path."""
    with AdminClient(place) as proxy:
        answer = proxy.get("/config")
        if answer.refusal:
            raise AdminClientError(f"{place.url}: {printable(answer.refusal)}")
        try:
            target = str(answer.told["config"]["server"][key])
        except (KeyError, TypeError):
            raise AdminClientError(f"{place.url} tells no configuration") from None
        relative = target not in (OFF, STDOUT) and not Path(target).is_absolute()
        return target, _folder_of(proxy) if relative else Path()


def _folder_of(proxy: AdminClient) -> Path:
    """A path in the file is as the proxy sees it, from the folder that it was started in."""
    pid = proxy.get("/status").told.get("pid")
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return Path()


def _show(path: Path, arguments: argparse.Namespace) -> None:
    shown = raw_line if arguments.raw else pretty_line
    try:
        with Tail(path, arguments.lines) as tail:
            _put(shown(line) for line in tail.first)
            while arguments.follow:
                _put(shown(line) for line in tail.more())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NoLogError(
            f"{path}: {error.strerror}: does the proxy run on this machine, and did it write "
            "anything yet? A log that was copied is shown by --file PATH"
        ) from None


def _put(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# Following a file across rotation. Each line is read whole and once; a renamed file is read to its
# end before the new file of that name, and a truncated file is read anew.

POLL_SECS: Final = 0.25
BLOCK_BYTES: Final = 65536
LINE_BYTES: Final = 1 << 20  # what has no end for so long is told in parts


class Tail:
    """The last lines at first, then those that come; closed by its `with`."""

    def __init__(self, path: Path, last: int, poll_secs: float = POLL_SECS) -> None:
        """Raises OSError."""
        self._path = path
        self._poll_secs = poll_secs
        self._pause = threading.Event()  # never set: a pause that Ctrl-C ends at once
        self._file: BinaryIO = path.open("rb")
        self._rest = b""
        self.first = self._last_lines(last)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def more(self) -> list[bytes]:
        """Lines that came since; a pause, then none, where there are none yet. Raises OSError."""
        found = self._read()
        if not found and self._rotated():
            found = self._read()  # what was written between the two looks
            if self._rest:
                found.append(self._rest)
            self._file.close()
            self._file, self._rest = self._path.open("rb"), b""
            found += self._read()
        if not found:
            self._pause.wait(self._poll_secs)
        return found

    def _read(self) -> list[bytes]:
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._rest = b""
        *lines, self._rest = (self._rest + self._file.read(LINE_BYTES)).split(b"\n")
        if len(self._rest) >= LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def _rotated(self) -> bool:
        """Another file has its name; none at all may only be late."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        opened = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (opened.st_dev, opened.st_ino)

    def _last_lines(self, count: int) -> list[bytes]:
        """Reads backwards, block by block; the file then stands at its end."""
        at = self._file.seek(0, os.SEEK_END)
        found = b""
        while at and found.count(b"\n") <= count and len(found) < (count + 1) * LINE_BYTES:
            begin = max(0, at - BLOCK_BYTES)
            self._file.seek(begin)
            found = self._file.read(at - begin) + found
            at = begin
        self._file.seek(0, os.SEEK_END)
        *lines, self._rest = found.split(b"\n")
        return lines[max(0, len(lines) - count) :]
