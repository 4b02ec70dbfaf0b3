"""`omni-proxy logs`: the access log or the route log of a proxy on this machine, pretty-printed;
`omni-proxy trace ID`: the route-log lines of a trace or a request.

Exit status 0: shown; 1: no log to show, or nothing found; 2: no proxy could be reached; 130:
Ctrl-C.

Invariant: a line that is not a log record is printed unchanged except for control characters; no
content of a file raises. `trace` reads the log once from its start, line by line, in constant
memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import msgspec

from omni_proxy.cli import EXIT_INTERRUPTED
from omni_proxy.cli.client.admin_client import (
    EXIT_NOT_REACHABLE,
    AdminClient,
    AdminClientError,
    AdminTarget,
    add_target_arguments,
    admin_target_of,
    config_of,
)
from omni_proxy.cli.flags.command_parser import CommandParser
from omni_proxy.cli.terminal_text import format_millis, parse_time, printable
from omni_proxy.shared.log_text import mask_secrets_in_text

# Route-log names to access-log names.
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
_NAMED: Final = ("request_id", "model")  # chosen by clients: never parsed as numbers
_ESCAPED: Final = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt\\])")


def raw_line(line: bytes) -> str:
    """The line unchanged, except that secrets in queries, which older versions logged, are
    masked."""
    return mask_secrets_in_text(line.decode(errors="replace"))


def pretty_line(line: bytes) -> str:
    """`10:00:01.204  200   840 ms  POST /v1/chat/completions  127.0.0.1:8011  completed ...`."""
    try:
        fields = msgspec.json.decode(raw_line(line))
    except (msgspec.DecodeError, UnicodeError):
        fields = _parse_text(raw_line(line))
    if not isinstance(fields, dict) or not {"at", "timestamp"} & fields.keys():
        return printable(raw_line(line).rstrip("\r"))
    record: dict[str, Any] = {
        _NAMES.get(str(name), str(name)): value for name, value in fields.items()
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


def _parse_text(line: str) -> dict[str, object] | None:
    """The fields of a line of `log_format = "text"`; None if it is ambiguous."""
    match = _TEXT.fullmatch(line)
    if match is None or parse_time(match["at"]) is None:
        return None
    record: dict[str, object] = {**match.groupdict()}
    tail = str(record.pop("rest") or "")
    for part in tail.split(" ") if tail else ():
        name, equals, value = part.partition("=")
        if not equals or name in record:
            return None
        record[name] = _unescaped(value) if name in _NAMED else _parsed(value)
    return record


def _unescaped(value: str) -> str:
    """The value without the escapes that the log writes."""
    return _ESCAPED.sub(lambda match: match[0].encode().decode("unicode_escape"), value)


def _parsed(value: str) -> object:
    if _WHOLE.fullmatch(value):
        return int(value)
    return float(value) if _DECIMAL.fullmatch(value) else _unescaped(value)


def _clock(timestamp: object) -> str:
    when = parse_time(timestamp if isinstance(timestamp, str) else None)
    return when.astimezone().isoformat(" ", "milliseconds")[11:23] if when else printable(timestamp)


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
    """Fields that are shown only if they are unusual."""
    parts = []
    if (first := _number(record, "first_byte_ms", "ttfb_s")) is not None and record.get("stream"):
        parts.append(f"first {format_millis(first)}")
    if isinstance(queued := record.get("queue_ms"), int | float) and queued >= 1:
        parts.append(f"queued {format_millis(queued)}")
    if record.get("model"):
        parts.append(f"model {printable(record['model'])}")
    if isinstance(attempts := record.get("attempts"), int) and attempts > 1:
        parts.append(f"{attempts} attempts")
    if record.get("error"):
        parts.append(f"error {printable(record['error'])}")
    if record.get("ended_by"):
        parts.append(f"by {printable(record['ended_by'])} in {printable(record.get('phase', '?'))}")
    if record.get("request_id"):
        parts.append(f"id {printable(record['request_id'])}")
    return parts


NO_LOG: Final = 1
LINES: Final = 20
OFF, STDOUT = "off", "-"
_EPILOG: Final = """\
examples:
  omni-proxy logs --follow
  omni-proxy logs --config proxy.toml --lines 500 --raw | jq .outcome
"""


class NoLogError(Exception):
    """There is no log, or not on this machine; the text gives the remedy."""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy logs",
        description="Print the access log of a proxy on this machine, one short line per request.",
        epilog=_EPILOG,
    )
    result.add_argument(
        "--follow", "-f", action="store_true", help="print new lines as they are written"
    )
    result.add_argument(
        "--lines", "-n", metavar="N", type=_count, default=LINES,
        help=f"the last N lines (default {LINES})",
    )  # fmt: skip
    result.add_argument("--route", action="store_true", help="print the route log instead")
    result.add_argument("--raw", action="store_true", help="print lines unchanged")
    result.add_argument(
        "--file", metavar="PATH", type=Path, help="read this log; no proxy is contacted"
    )
    add_target_arguments(result)
    return result


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a number of lines")
    return int(text)


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        path = arguments.file or log_file(arguments)
        _show(path, arguments)
    except AdminClientError as error:
        print(f"omni-proxy logs: {error}", file=sys.stderr)
        return EXIT_NOT_REACHABLE
    except NoLogError as error:
        print(f"omni-proxy logs: {error}", file=sys.stderr)
        return NO_LOG
    except BrokenPipeError:
        # The reader closed the pipe (`| head`); the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def log_file(arguments: argparse.Namespace) -> Path:
    """The proxy's log, from its configuration file or from the running proxy. Raises
    AdminClientError, NoLogError."""
    key = "route_log" if arguments.route else "access_log"
    folder = Path()
    config, broken = config_of(arguments)
    if config is not None and not broken:
        target = str(getattr(config.server, key))
    else:
        target, folder = _query_running_proxy(admin_target_of(arguments), key)
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


def _query_running_proxy(target_proxy: AdminTarget, key: str) -> tuple[str, Path]:
    """`[server] key` of the running proxy, and the folder that a relative path starts from."""
    with AdminClient(target_proxy) as proxy:
        reply = proxy.get("/config")
        if reply.refusal:
            raise AdminClientError(f"{target_proxy.url}: {printable(reply.refusal)}")
        try:
            target = str(reply.body["config"]["server"][key])
        except (KeyError, TypeError):
            raise AdminClientError(f"{target_proxy.url} did not return its configuration") from None
        relative = target not in (OFF, STDOUT) and not Path(target).is_absolute()
        return target, _folder_of(proxy) if relative else Path()


def _folder_of(proxy: AdminClient) -> Path:
    """The proxy's working directory: relative paths in its file start there."""
    pid = proxy.get("/status").body.get("pid")
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return Path()


def _show(path: Path, arguments: argparse.Namespace) -> None:
    render = raw_line if arguments.raw else pretty_line
    try:
        with Tail(path, arguments.lines) as tail:
            _put(render(line) for line in tail.first)
            while arguments.follow:
                _put(render(line) for line in tail.more())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NoLogError(
            f"{path}: {error.strerror}: does the proxy run on this machine, and has it written "
            "anything yet? Use --file PATH for a copied log"
        ) from None


def _put(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# Following a file across rotation. Each line is read whole and once; a renamed file is read to its
# end before the new file of that name, and a truncated file is read again from its start.

POLL_SECS: Final = 0.25
BLOCK_BYTES: Final = 65536
LINE_BYTES: Final = 1 << 20  # a longer line is printed in parts


class Tail:
    """The last lines of a file, then new ones; a context manager."""

    def __init__(self, path: Path, last: int, poll_secs: float = POLL_SECS) -> None:
        """Raises OSError."""
        self._path = path
        self._poll_secs = poll_secs
        self._pause = threading.Event()  # never set: Ctrl-C interrupts this wait
        self._file: BinaryIO = path.open("rb")
        self._partial = b""
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
        """New lines; if there are none, [] after a pause. Raises OSError."""
        lines = self._read()
        if not lines and self._rotated():
            lines = self._read()  # written between the read and the check
            if self._partial:
                lines.append(self._partial)
            self._file.close()
            self._file, self._partial = self._path.open("rb"), b""
            lines += self._read()
        if not lines:
            self._pause.wait(self._poll_secs)
        return lines

    def _read(self) -> list[bytes]:
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._partial = b""
        *lines, self._partial = (self._partial + self._file.read(LINE_BYTES)).split(b"\n")
        if len(self._partial) >= LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        return lines

    def _rotated(self) -> bool:
        """Whether another file has the name now; a missing file is not a rotation yet."""
        try:
            current = self._path.stat()
        except FileNotFoundError:
            return False
        opened = os.fstat(self._file.fileno())
        return (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino)

    def _last_lines(self, count: int) -> list[bytes]:
        """Read backwards, block by block; leaves the file position at its end."""
        position = self._file.seek(0, os.SEEK_END)
        data = b""
        while position and data.count(b"\n") <= count and len(data) < (count + 1) * LINE_BYTES:
            begin = max(0, position - BLOCK_BYTES)
            self._file.seek(begin)
            data = self._file.read(position - begin) + data
            position = begin
        self._file.seek(0, os.SEEK_END)
        *lines, self._partial = data.split(b"\n")
        return lines[max(0, len(lines) - count) :]


_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_EPILOG: Final = """\
examples:
  omni-proxy trace 4bf92f3577b34da6a3ce929d0e0e4736 --config proxy.toml
  omni-proxy trace chatcmpl-17 --file route.log --json
"""


def trace_parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="omni-proxy trace",
        description="Print the route-log lines of a trace or a request, from a proxy on this "
        "machine: time, worker, outcome and durations.",
        epilog=_TRACE_EPILOG,
    )
    result.add_argument(
        "id", metavar="ID", help="a trace id, a whole traceparent, or the id of a request"
    )
    result.add_argument("--json", action="store_true", help="print the lines unchanged")
    result.add_argument(
        "--file", metavar="PATH", type=Path, help="read this log; no proxy is contacted"
    )
    add_target_arguments(result)
    return result


def main_trace(argv: Sequence[str]) -> int:
    arguments = trace_parser().parse_args(argv)
    arguments.route = True
    whole = _TRACEPARENT.fullmatch(arguments.id)
    wanted = whole[1] if whole else arguments.id
    count = 0
    try:
        path = arguments.file or log_file(arguments)
        for line, record in _found(path, wanted):
            print(
                raw_line(line) if arguments.json else ("\n" if count else "") + _fields_of(record)
            )
            count += 1
    except AdminClientError as error:
        print(f"omni-proxy trace: {error}", file=sys.stderr)
        return EXIT_NOT_REACHABLE
    except NoLogError as error:
        print(f"omni-proxy trace: {error}", file=sys.stderr)
        return NO_LOG
    if count:
        return 0
    print(
        f"omni-proxy trace: {path} has no request with the trace or id {printable(wanted)}: it "
        "has not ended yet, was not sampled, or is in a rotated log, which --file PATH reads",
        file=sys.stderr,
    )
    return NO_LOG


def _found(path: Path, wanted: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Raises NoLogError."""
    needle = json.dumps(wanted)[1:-1].encode()
    try:
        with path.open("rb") as file:
            for line in file:
                if needle not in line:
                    continue
                record = _record_of(line)
                if wanted in (record.get("trace_id"), record.get("request_id")):
                    yield line.rstrip(b"\n"), record
    except OSError as error:
        raise NoLogError(
            f"{path}: {error.strerror}: does the proxy run on this machine, and has it written "
            "anything yet? Use --file PATH for a copied log"
        ) from None


def _record_of(line: bytes) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError):
        return {}
    return record if isinstance(record, dict) else {}


def _fields_of(record: dict[str, Any]) -> str:
    """One field per line, without fields that have no value."""
    fields = {name: value for name, value in record.items() if value not in (None, "", [])}
    width = max(map(len, fields), default=0)
    return "\n".join(
        f"{printable(name):<{width}}  {printable(_value_text(value))}"
        for name, value in fields.items()
    )


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
