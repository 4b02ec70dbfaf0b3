"""`omni-proxy logs`: the access log or the route log of a proxy on this machine, pretty-printed.

Exit status 0: shown; 1: no log to show; 2: nobody could be asked where it is; 130: Ctrl-C.

A line of the access log or the route log as a person reads it.

PURE. Invariant: what is no record of ours comes out as it is, made harmless; nothing raises.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import msgspec

from omni_proxy.cli.client.admin_client import (
    NO_SUCH_PLACE,
    AdminClient,
    AdminClientError,
    AdminTarget,
    add_target_arguments,
    admin_target_of,
    config_of,
)
from omni_proxy.cli.screen.text_table import format_millis, parse_time, printable
from omni_proxy.wire.log_text import mask_secrets_in_text

# Of the access log; of the route log where its name for the same thing differs.
_NAMES: Final = {
    "timestamp": "at",
    "path": "target",
    "status_code": "status",
    "worker_url": "worker",
    "error_type": "error",
    "attempt": "attempts",
}

_TEXT: Final = re.compile(
    r"(?P<at>\S+) (?P<client>\S+) (?P<method>[A-Z]+) (?P<target>\S+) (?P<status>[0-9]{1,3}) "
    r"(?P<outcome>[a-z_]+)(?: (?P<rest>.*))?"
)
_WHOLE: Final = re.compile(r"[0-9]{1,18}")
_DECIMAL: Final = re.compile(r"[0-9]{1,18}\.[0-9]{1,9}")
_NAMED: Final = ("request_id", "model")  # by whoever asks: never a number
_ESCAPED: Final = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt\\])")


def raw_line(line: bytes) -> str:
    """But for secrets in queries, which older versions wrote."""
    return mask_secrets_in_text(line.decode(errors="replace"))


def pretty_line(line: bytes) -> str:
    """`10:00:01.204  200   840 ms  POST /v1/chat/completions  127.0.0.1:8011  completed ...`."""
    try:
        told = msgspec.json.decode(raw_line(line))
    except (msgspec.DecodeError, UnicodeError):
        told = _of_text(raw_line(line))
    if not isinstance(told, dict) or not {"at", "timestamp"} & told.keys():
        return printable(raw_line(line).rstrip("\r"))
    record: dict[str, Any] = {
        _NAMES.get(str(name), str(name)): value for name, value in told.items()
    }
    first = "  ".join(
        (
            _clock(record.get("at")),
            f"{printable(record.get('status') or '---'):>3}",
            f"{format_millis(_number(record, 'total_ms', 'duration_s')):>7}",
            f"{printable(record.get('method', ''))} {printable(record.get('target', ''))}",
            printable(str(record.get("worker") or "-").removeprefix("http://")),
            printable(_outcome(record)),
        )
    )
    return "  ".join([first, *_more(record)])


def _of_text(line: str) -> dict[str, object] | None:
    """What a line of `log_format = "text"` says; None where it could be read in another way."""
    found = _TEXT.fullmatch(line)
    if found is None or parse_time(found["at"]) is None:
        return None
    record: dict[str, object] = {**found.groupdict()}
    rest = str(record.pop("rest") or "")
    for part in rest.split(" ") if rest else ():
        name, equals, value = part.partition("=")
        if not equals or name in record:
            return None
        record[name] = _plainly(value) if name in _NAMED else _told(value)
    return record


def _plainly(value: str) -> str:
    """What stands in the log as one word, as it was said."""
    return _ESCAPED.sub(lambda found: found[0].encode().decode("unicode_escape"), value)


def _told(value: str) -> object:
    if _WHOLE.fullmatch(value):
        return int(value)
    return float(value) if _DECIMAL.fullmatch(value) else _plainly(value)


def _clock(at: object) -> str:
    when = parse_time(at if isinstance(at, str) else None)
    return when.astimezone().isoformat(" ", "milliseconds")[11:23] if when else printable(at)


def _number(record: dict[str, Any], millis_key: str, secs_key: str) -> float | None:
    value, factor = record.get(millis_key), 1.0
    if value is None:
        value, factor = record.get(secs_key), 1000.0
    return value * factor if isinstance(value, int | float) else None


def _outcome(record: dict[str, Any]) -> object:
    if "outcome" in record:
        return record["outcome"]
    if record.get("client_disconnected"):
        return "client_disconnected"
    return "completed" if record.get("completed") else record.get("event", "")


def _more(record: dict[str, Any]) -> list[str]:
    """What is only worth its place where it is unusual."""
    words = []
    if (first := _number(record, "first_ms", "ttfb_s")) is not None and record.get("stream"):
        words.append(f"first {format_millis(first)}")
    if isinstance(queued := record.get("queue_ms"), int | float) and queued >= 1:
        words.append(f"queued {format_millis(queued)}")
    if record.get("model"):
        words.append(f"model {printable(record['model'])}")
    if isinstance(attempts := record.get("attempts"), int) and attempts > 1:
        words.append(f"{attempts} attempts")
    if record.get("error"):
        words.append(f"error {printable(record['error'])}")
    if record.get("ended_by"):
        words.append(f"by {printable(record['ended_by'])} in {printable(record.get('phase', '?'))}")
    if record.get("request_id"):
        words.append(f"id {printable(record['request_id'])}")
    return words


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
