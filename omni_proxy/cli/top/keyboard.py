"""Keys out of a terminal: its mode while we own it, and what its bytes mean.

Invariant: the terminal is as it was before when the `with` is left, however.
"""

from __future__ import annotations

import re
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_KEYS: Final = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[C": "right", b"\x1bOC": "right", b"\x1b[D": "left", b"\x1bOD": "left",
    b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[7~": "home",
    b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end", b"\x1b[8~": "end",
    b"\x03": "ctrl-c", b"\x0c": "ctrl-l", b"\r": "enter", b"\n": "enter", b"\x1b": "escape",
    b" ": "pagedown",
}  # fmt: skip
# An escape sequence of any kind, else one byte.
_TOKEN: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[ -~]|.", re.DOTALL)
_LFLAG, _CC = 3, 6  # places in what tcgetattr returns


def parse_keys(typed: bytes) -> list[str]:
    """The names of the keys; what is none of ours is left out."""
    found = []
    for token in _TOKEN.findall(typed):
        if token in _KEYS:
            found.append(_KEYS[token])
        elif len(token) == 1 and 0x20 < token[0] < 0x7F:
            found.append(token.decode("ascii"))
    return found


@contextmanager
def raw_keyboard(descriptor: int) -> Iterator[None]:
    """Each key comes when it is pressed, unseen; Ctrl-C and Ctrl-Z are keys too. Raises OSError."""
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error as error:
        raise OSError(*error.args) from None
    now = termios.tcgetattr(descriptor)
    # A signal would end or stop us while the screen is ours.
    now[_LFLAG] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    now[_CC][termios.VMIN], now[_CC][termios.VTIME] = 1, 0
    termios.tcsetattr(descriptor, termios.TCSANOW, now)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal is gone: nothing to put back
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
