"""The end of a file of lines, and what is added to it, across rotation.

Invariant: a line is told whole and once. A file that was renamed away is read to its end before the
new one of its name is begun; one that was cut is begun anew.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

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
        mine = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

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
